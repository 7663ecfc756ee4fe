"""`epd` run like a user would, in a state directory of its own, on real or stand-in engines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).parents[3]
STANDINS = Path(__file__).parent / "standins"
PATIENCE_S = 150.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"never came true: {what}")


@dataclass
class Epd:
    """The command, and what it leaves behind."""

    python: Path
    home: Path
    """All state directories of the test lie in here."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        own = {"XDG_STATE_HOME": str(self.home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        inherited = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
        return inherited | own  # of NIXL's networks `epd up` itself must think

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs to the end."""
        command = [self.python.with_name("epd"), *arguments]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Runs in the foreground while the test goes on."""
        return self.start_command(self.python.with_name("epd"), *arguments)

    def start_command(self, *command: str | Path) -> subprocess.Popen[str]:
        """Runs another command in the same surroundings, in a process group of its own as a shell does."""
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            preexec_fn=_heed_signals,
        )
        self.started.append(process)
        return process

    def ps(self) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = json.loads(self.run("ps", "--json").stdout)
        return states

    def state(self) -> dict[str, Any]:
        """What the supervisor last wrote down; empty where it has not yet."""
        files = list(self.home.glob("epd/*/state.json"))
        try:
            state: dict[str, Any] = json.loads(files[0].read_text()) if files else {}
        except FileNotFoundError:
            return {}
        return state

    def until_ready(self) -> dict[str, Any]:
        """Waits for the deployment and for each of its processes."""

        def all_ready() -> dict[str, Any] | None:
            state = self.state()
            phases = {process["phase"] for process in state.get("processes", ())}
            return state if state.get("phase") == "ready" and phases == {"ready"} else None

        ready: dict[str, Any] = until(all_ready, "all processes ready")
        return ready

    def processes(self) -> list[psutil.Process]:
        """All that runs on behalf of this test, the supervisor included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("XDG_STATE_HOME") == str(self.home):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def files(self) -> list[Path]:
        return list(self.home.rglob("*"))

    def assert_nothing_left(self) -> None:
        assert self.processes() == []
        assert self.files() == []


def _heed_signals() -> None:
    """Undoes what a test run in the background or under nohup hands on: signals that are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def with_clean_end(epd: Epd) -> Iterator[Epd]:
    """Ends whatever a failed test has left running."""
    yield epd
    for process in epd.processes():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    for started in epd.started:
        started.wait()


def environment_with_standins(path: Path) -> Path:
    """A virtual environment that shares everything with the running one but the two commands."""
    (path / "bin").mkdir(parents=True)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", path)
    (path / "lib").symlink_to(Path(sys.prefix) / "lib")
    python = path / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.executable).with_name("epd"), path / "bin")
    entry = path / "bin" / "epd"
    entry.write_text(f"#!{python}\n" + entry.read_text().partition("\n")[2])
    for name in ("engine", "proxy"):
        command = path / "bin" / f"epd-{name}"
        command.write_text(f"#!{python}\n{(STANDINS / f'{name}.py').read_text()}")
        command.chmod(0o755)
    return python
