"""The processes of a chaos test: watched, killed, stopped, and started again."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import store_workers
from tests.support.processes import BIN, free_port
from tests.support.store_crashes import DIES
from tests.support.store_node import REPOSITORY, node_command, python_path
from tests.support.store_workers import EXIT_REFUSED, Beat, Post

HANG_SECONDS = 60.0  # without a sign of life, on a machine with two busy cores; a full store answers in 5 s
RESTART_SECONDS = 0.3

Complain = Callable[..., None]


def fork_server() -> Any:
    """Has torch and the connectors imported once, so that a new process costs milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([store_workers.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", python_path())
        forkserver.ensure_running()
    return context


@dataclass
class Member:
    """One place in the crew; a process that dies there is followed by another."""

    post: Post
    context: Any
    complain: Complain
    totals: Counter[str] = field(default_factory=Counter)
    starts: list[float] = field(default_factory=list)
    stopped: bool = False
    _process: BaseProcess | None = None
    _killed: bool = False
    _due: float = 0.0
    _moved: float = 0.0  # when it was started or allowed to go on

    @property
    def pid(self) -> int:
        return self._process.pid or 0 if self._process is not None else 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        self.post.beat.unlink(missing_ok=True)
        post = replace(self.post, seed=f"{self.post.seed}/{len(self.starts)}")
        process = self.context.Process(target=store_workers.main, args=(post,), daemon=True)
        process.start()
        self._process, self._killed, self.stopped = process, False, False
        self._moved = time.monotonic()
        self.starts.append(self._moved)

    def kill(self) -> None:
        if self.is_alive:
            self._killed = True
            os.kill(self.pid, signal.SIGKILL)
            self.totals["killed"] += 1

    def stop(self) -> Callable[[], None]:
        """SIGSTOP; what is returned lets it go on."""
        if not self.is_alive:
            return lambda: None
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        self.stopped = True
        self.totals["stopped"] += 1

        def go_on() -> None:
            if self.pid == pid and self.is_alive:
                os.kill(pid, signal.SIGCONT)
                self.stopped, self._moved = False, time.monotonic()

        return go_on

    def look_after(self, now: float, *, ending: bool = False) -> None:
        """Starts a successor of a dead one; complains of one that hangs, or died by itself."""
        if self._process is None:
            if now >= self._due and not ending:
                self.start()
            return
        beat = Beat.read(self.post.beat)
        if self._process.exitcode is None:
            if not self.stopped and now - max(beat.at, self._moved) > HANG_SECONDS:
                self.complain("a process hangs", self.post.name, doing=beat.doing, stack=self._stack())
                self.kill()
            return
        status = self._process.exitcode
        self.totals += beat.counts
        if status == EXIT_REFUSED:
            self.totals["refused to start"] += 1
        elif status == -signal.SIGKILL and (self._killed or beat.doing == DIES):
            self.totals["died in the midst of a write"] += not self._killed
        elif status or not ending:
            self.complain(f"a process ended with {status}", self.post.name, log=_tail(self.post.log))
        self._process.join()
        self._process, self._due = None, now + RESTART_SECONDS

    def _stack(self) -> str:
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return _tail(self.post.stack)


@dataclass
class Janitor:
    """`epd-engine store janitor` with a user of its own."""

    name: str
    arguments: list[str]
    uid: int
    gid: int
    log: Path
    complain: Complain
    stopped: bool = False
    killed: int = 0
    url: str = ""
    _process: "subprocess.Popen[bytes] | None" = None
    _killed: bool = False

    def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(BIN / "epd-engine"), "store", "janitor", *self.arguments, "--port", str(port)]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                node_command(command, uid=self.uid, gid=self.gid), stdout=log, stderr=log, cwd=REPOSITORY
            )
        self._killed = self.stopped = False

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._killed = True
            self._process.kill()
            self.killed += 1

    def stop(self) -> Callable[[], None]:
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        self.stopped = True

        def go_on() -> None:
            if self._process is process:
                process.send_signal(signal.SIGCONT)
                self.stopped = False

        return go_on

    def look_after(self) -> None:
        if self._process is None or self._process.poll() is None:
            return
        if not self._killed:
            self.complain(f"ended with {self._process.returncode}", self.name, log=_tail(self.log))
        self.start()

    @property
    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def usage(self) -> dict[str, Any]:
        """What it answers; empty where it does not."""
        try:
            answer = httpx.get(f"{self.url}/usage", timeout=5)
        except httpx.TransportError:
            return {}
        return dict(answer.json()) if answer.status_code == 200 else {}

    def end(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _tail(path: Path) -> str:
    try:
        return path.read_text()[-3000:]
    except OSError:
        return ""
