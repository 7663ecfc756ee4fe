"""A real proxy in front of scripted engines, all over HTTP on this event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from epd_proxy.app import Proxy
from tests.integration.proxy.scripted import Engine


@dataclass
class Setup:
    """A running proxy, a client of it, and its engines."""

    proxy: Proxy
    client: httpx.AsyncClient
    encoders: list[Engine]
    pds: list[Engine]
    prefills: list[Engine] = field(default_factory=list)
    decodes: list[Engine] = field(default_factory=list)

    async def chat(self, *parts: Any, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body(*parts, **fields), headers=headers)

    async def until_metric(self, name: str, value: float) -> None:
        """Wait until a series has reached `value`."""

        async def reached() -> bool:
            return await self.metric(name) >= value

        await until(reached)

    async def until_ready(self, role: str, expected: list[bool]) -> None:
        """Wait until `/ready` lists exactly these states for a role."""

        async def seen() -> bool:
            return states(await self.client.get("/ready"), role) == expected

        await until(seen)

    async def metric(self, name: str) -> float:
        """The value of one series, 0 where it was never touched."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == name)


def states(ready: httpx.Response, role: str) -> list[bool]:
    return [one["ready"] for one in ready.json()["roles"][role]]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that can only be seen from outside; the test's own time limit ends it."""
    while not await holds():  # noqa: ASYNC110 - the other side is another server
        await asyncio.sleep(0.01)


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "digits", "messages": [{"role": "user", "content": list(parts)}], **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **more}


MakeSetup = Callable[..., Awaitable[Setup]]


class serving:
    """uvicorn on a free port, in this loop."""

    def __init__(self, proxy: Proxy) -> None:
        config = uvicorn.Config(
            proxy, port=0, http="httptools", log_config=None, lifespan="on", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)

    async def __aenter__(self) -> str:
        self._server.capture_signals = nullcontext  # pytest keeps the signals
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not self._task.done(), self._task.result()
            await asyncio.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
