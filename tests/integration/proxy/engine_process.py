"""Scripted prefill and decode instances as processes of their own, to be killed and stopped.

    python -m tests.integration.proxy.engine_process prefill

prints its port. A decode instance takes over the KV that the params name by asking the prefill instance, so
it is missing once that one is dead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from tests.integration.proxy.scripted import (
    DONE,
    ROLE,
    Call,
    Engine,
    Handler,
    error_body,
    event,
    prefilled,
    start_stream,
)


@dataclass
class EngineProcess:
    """A running one."""

    process: asyncio.subprocess.Process
    url: str

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def engine_process(role: str) -> AsyncIterator[EngineProcess]:
    """An instance, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, role, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        yield EngineProcess(process, f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def prefills(engine: Engine) -> Handler:
    async def handler(call: Call) -> web.StreamResponse:
        if "long prompt" in str(call.body["messages"]):
            await asyncio.sleep(600)
        return await prefilled({"remote": engine.url})(call)

    return handler


async def decodes(call: Call) -> web.StreamResponse:
    """Takes the KV over, and then makes a token each 20 ms for as long as it is asked to."""
    remote = call.body["kv_transfer_params"]["remote"]
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{remote}/health") as found:
            found.raise_for_status()
    except aiohttp.ClientError:
        return web.json_response(error_body("the prefill instance is gone", "kv_miss"), status=503)
    tokens = [
        event(content=f"from {remote} by {os.getpid()}"),
        *[event(content=".")] * call.body["max_tokens"],
    ]
    response = await start_stream(call)
    for piece in (ROLE, *tokens, DONE):
        await response.write(piece)
        await asyncio.sleep(0.02)
    return response


async def main(role: str) -> None:
    engine = Engine(decodes)
    if role == "prefill":
        engine.default = prefills(engine)
    await engine.start()
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
