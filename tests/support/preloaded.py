"""Engines that are forked from one that has imported everything already.

An engine's imports take most of its start, and the suites start hundreds of engines. Each is a process of its
own all the same, with its own signals, exit status, log and memory.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from tests.support.processes import Server

# What an engine has imported when it is ready. Nothing of it may start a thread.
MODULES = [
    "epd_engine.cli",
    "epd_engine.server.serve",
    "epd_engine.models.qwen2_5_vl",
    "epd_engine.models.qwen2_audio",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(MODULES)


class PreloadedEngine(Server):
    """An `epd-engine` whose command line runs in a fork."""

    def spawn(self) -> "Forked":
        return Forked(self.argv[1:], self.log, self.environment())


class Forked:
    """`subprocess.Popen`, as far as `Server` uses it, for an `epd-engine`."""

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]):
        """Runs with `arguments` after the command's name; what it writes is appended to `log`."""
        _ensure_running(environment)
        self._process = _context.Process(
            target=_run, args=(list(arguments), log, dict(environment)), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return status


def _ensure_running(environment: Mapping[str, str]) -> None:
    """Libraries read some variables when they are imported."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["epd-engine", *arguments]
    from epd_engine.cli import main

    main(arguments)
