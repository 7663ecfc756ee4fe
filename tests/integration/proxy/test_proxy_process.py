"""The `epd-proxy` command as a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.proxy.harness import body, image, text, until
from tests.integration.proxy.scripted import DONE, ROLE, Engine, decode, encode, event, start_stream


@dataclass
class Running:
    client: httpx.AsyncClient
    process: asyncio.subprocess.Process
    encoder: Engine
    pd: Engine

    async def stop(self) -> list[dict]:
        """End the process with SIGTERM; its log lines."""
        self.process.send_signal(signal.SIGTERM)
        _, log = await self.process.communicate()
        return [json.loads(line) for line in log.splitlines()]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@asynccontextmanager
async def running(*flags: str) -> AsyncIterator[Running]:
    encoder, pd = Engine(encode), Engine(decode)
    await encoder.start()
    await pd.start()
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "from epd_proxy.cli import main; main()"),
        *("--encoder", encoder.url, "--pd", pd.url, "--port", str(port), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:

            async def up() -> bool:
                assert process.returncode is None, await process.stderr.read()
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await until(up)
            yield Running(client, process, encoder, pd)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await encoder.stop()
        await pd.stop()


def gated(gate: asyncio.Event):
    async def handler(call):
        response = await start_stream(call)
        await response.write(ROLE + event(content="s"))
        await gate.wait()
        await response.write(DONE)
        return response

    return handler


async def test_it_serves_and_logs_one_json_line_a_request():
    async with running() as r:
        answer = await r.client.post(
            "/v1/chat/completions", json=body(image("a")), headers={"x-request-id": "mine"}
        )
        assert answer.status_code == 200
        lines = await r.stop()
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["request_id"], line["status"], line["stage"], line["items"]) == ("mine", 200, "pd", 1)
    assert line["pd"] == r.pd.url
    assert {"time", "level", "total_s", "ttft_s", "primer_s"} <= set(line)


async def test_a_stream_in_flight_is_finished_before_the_process_ends():
    async with running() as r:
        gate = asyncio.Event()
        r.pd.script.append(gated(gate))
        async with r.client.stream(
            "POST", "/v1/chat/completions", json=body(text("hi"), stream=True)
        ) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == ROLE + event(content="s")
            ending = asyncio.create_task(r.stop())

            async def closed() -> bool:
                try:
                    async with httpx.AsyncClient() as other:
                        await other.get(r.client.base_url.join("/health"))
                except httpx.ConnectError:
                    return True
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    return False  # it was in the queue when the door closed
                return False

            await until(closed)
            gate.set()
            assert b"".join([piece async for piece in pieces]) == DONE
        await ending


async def test_a_stream_that_outlasts_the_drain_ends_in_an_error_event():
    async with running("--drain-timeout", "1") as r:
        r.pd.script.append(gated(asyncio.Event()))
        async with r.client.stream(
            "POST", "/v1/chat/completions", json=body(text("hi"), stream=True)
        ) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == ROLE + event(content="s")
            ending = asyncio.create_task(r.stop())
            rest = b"".join([piece async for piece in pieces])
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        await ending


@pytest.mark.parametrize("role", ["encoder", "pd"])
async def test_it_starts_before_its_engines(role: str):
    dead = f"http://127.0.0.1:{free_port()}"
    async with running(f"--{role}", dead) as r:
        ready = (await r.client.get("/ready")).json()
        assert [one["ready"] for one in ready["roles"][role]] == [True, False]
