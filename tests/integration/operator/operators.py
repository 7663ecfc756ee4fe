"""The operator as a real process beside a real API server."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.processes import BIN, free_port
from tests.support.waiting import eventually

PATIENCE_S = 120.0  # a machine under load

ENGINE_IMAGE, PROXY_IMAGE = "localhost/epd-engine:test", "localhost/epd-proxy:test"


class OperatorProcess:
    """One `epd-operator run`; `log` is what it wrote."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        self.log = log
        self._health, self._metrics = free_port(), free_port()
        self._argv = [
            str(BIN / "epd-operator"),
            "run",
            f"--kubeconfig={kubeconfig}",
            f"--engine-image={ENGINE_IMAGE}",
            f"--proxy-image={PROXY_IMAGE}",
            f"--health-port={self._health}",
            f"--metrics-port={self._metrics}",
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "OperatorProcess":
        env = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=env)
        return self

    def wait_ready(self) -> "OperatorProcess":
        try:
            eventually(lambda: self.exit_code is not None or self.health("readyz") == 200, PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"never ready:\n{self.tail()}") from None
        assert self.exit_code is None, f"ended with {self.exit_code}:\n{self.tail()}"
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text()[-characters:]

    def lines(self) -> list[dict[str, object]]:
        """The log, a JSON object a line."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def health(self, path: str = "healthz") -> int:
        """The status code; 0 without an answer."""
        try:
            return httpx.get(f"http://127.0.0.1:{self._health}/{path}", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a sample over the label sets that match."""
        total = 0.0
        for line in httpx.get(f"http://127.0.0.1:{self._metrics}/metrics", timeout=30).text.splitlines():
            head, _, value = line.rpartition(" ")
            sample, _, rest = head.partition("{")
            if sample == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                total += float(value)
        return total

    def ticks(self) -> float:
        return self.metric("epd_operator_ticks_total")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        if self.exit_code is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self._process.wait(40)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not heed SIGTERM:\n{self.tail()}") from None


@contextmanager
def running(kubeconfig: Path, log: Path, *arguments: str) -> Iterator[OperatorProcess]:
    """An operator that is ready, and ended afterwards."""
    process = OperatorProcess(kubeconfig, log, *arguments).start()
    try:
        yield process.wait_ready()
    finally:
        if process.exit_code is None:
            process.stop()
