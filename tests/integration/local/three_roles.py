"""Encoder, prefill and decode under `epd up`, asked at their one address and looked at from outside."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.integration.local.epd_runner import REPOSITORY, Epd, until, with_clean_end

EXAMPLE = REPOSITORY / "examples" / "digits-epd.yaml"
Messages = list[dict[str, Any]]


@dataclass
class Running:
    """The deployment, asked at its one address."""

    epd: Epd
    state: dict[str, Any]

    def ask(self, messages: Messages, **fields: Any) -> httpx.Response:
        return httpx.post(self.url, json=self.body(messages, **fields), timeout=120)

    @property
    def url(self) -> str:
        return f"{self.state['address']}/v1/chat/completions"

    @staticmethod
    def body(messages: Messages, **fields: Any) -> dict[str, Any]:
        asked = {"model": "digits-vl", "messages": messages, "max_tokens": 12, "temperature": 0}
        return {**asked, "return_token_ids": True, **fields}

    def process(self, role: str, index: int = 0) -> dict[str, Any]:
        processes = self.epd.state()["processes"]
        found: dict[str, Any] = next(one for one in processes if one["name"] == f"{role}-{index}")
        return found

    def signal(self, role: str, number: signal.Signals, index: int = 0) -> None:
        """After a SIGKILL the process is gone."""
        pid = self.process(role, index)["pid"]
        os.kill(pid, number)
        if number is signal.SIGKILL:
            until(lambda: not psutil.pid_exists(pid), "its end")

    def metric(self, role: str, name: str, index: int = 0) -> float:
        """The value of a series without labels of an engine of a role."""
        return _series(f"{self.engine(role, index)}/metrics", name)

    def engine(self, role: str, index: int = 0) -> str:
        """The address of one behind the proxy."""
        return f"http://127.0.0.1:{self.process(role, index)['port']}"

    def log(self, role: str, index: int = 0) -> str:
        """What an engine has written."""
        return self.epd.run("logs", f"{role}-{index}").stdout

    @contextmanager
    def between_prefill_and_decode(
        self, messages: Messages, decodes: int = 1, **fields: Any
    ) -> Iterator[Future[httpx.Response]]:
        """Asks, and holds the request where prefill has handed its KV on and decode, of which there are
        `decodes`, has not taken it."""
        kv = Path(self.state["store"], "kv")
        until(lambda: not list(kv.rglob("*.safetensors")), "all others are done")
        pids = [self.process("decode", index)["pid"] for index in range(decodes)]
        with _stopped(pids) as go_on, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, messages, **fields)
            until(lambda: self.outstanding("decode") == 1, "a call to decode")
            yield asked
            go_on()

    def outstanding(self, role: str, index: int = 0) -> int:
        """Requests of the proxy at an instance of a role."""
        found: int = self._known_to_proxy()[role][index]["outstanding"]
        return found

    def reprefills(self) -> float:
        return _series(f"{self.state['address']}/metrics", "epd_proxy_reprefills_total")

    def kill(self, role: str) -> None:
        """SIGKILL, and wait until it serves again."""
        process = self.process(role)
        os.kill(process["pid"], signal.SIGKILL)
        self.until_back(role, process["restarts"])

    def until_back(self, role: str, restarts: int) -> None:
        until(lambda: self.process(role)["restarts"] > restarts, "a restart")
        self.until_all_ready()

    def until_all_ready(self) -> None:
        """Every process serves, and the proxy knows of it."""
        self.epd.until_ready()

        def known_to_proxy() -> bool:
            return all(one["ready"] for ones in self._known_to_proxy().values() for one in ones)

        until(known_to_proxy, "the proxy has taken it back")

    def _known_to_proxy(self) -> dict[str, Any]:
        roles: dict[str, Any] = httpx.get(f"{self.state['address']}/ready").json()["roles"]
        return roles


@contextmanager
def deployed(home: Path, document: Path) -> Iterator[Running]:
    """A document up and ready; afterwards nothing is left of it."""
    epd = Epd(Path(sys.executable), home)
    for _ in with_clean_end(epd):
        up = epd.run("up", "-d", "-f", document, "--port", "0")
        assert up.returncode == 0, up.stdout + up.stderr
        yield Running(epd, epd.until_ready())
        assert epd.run("down").returncode == 0
        epd.assert_nothing_left()


@contextmanager
def _stopped(pids: list[int]) -> Iterator[Callable[[], None]]:
    """Processes that stand still until the function is called."""

    def go_on() -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield go_on
    finally:
        go_on()


def _series(url: str, name: str) -> float:
    lines = httpx.get(url).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
