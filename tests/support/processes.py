"""Servers as real processes on free ports, ended whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 300.0  # a cold machine with one busy core
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One process that answers `ready_path`; `url` is its address, `log` what it wrote."""

    ready_path = "/ready"

    def __init__(self, name: str, argv: Sequence[str], port: int, log: Path):
        self.name, self.argv, self.port, self.log = name, list(argv), port, log
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        self._process = self.spawn()
        return self

    def spawn(self) -> Any:
        """A `subprocess.Popen`, or what is used like one."""
        with open(self.log, "ab") as log:
            return subprocess.Popen(self.argv, stdout=log, stderr=log, env=self.environment())

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def wait_ready(self) -> "Server":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                break
            try:
                if httpx.get(f"{self.url}{self.ready_path}", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{self.name} is not ready:\n{self.log.read_text()[-4000:]}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not heed it."""
        if self._process is None or self.exit_code is not None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.wait(40)
        except subprocess.TimeoutExpired:
            self.kill()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a Prometheus sample over the label sets that match."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            head, _, value = line.rpartition(" ")
            sample, _, rest = head.partition("{")
            if sample == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += float(value)
        return total


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Starts all at once, waits until all are ready, ends all."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.stop()
