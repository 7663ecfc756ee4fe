"""Prefill and decode instances that are killed and stopped for real, at each point of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from epd_proxy.app import Proxy
from epd_proxy.config import Config, Limits, Origin
from tests.integration.proxy.engine_process import EngineProcess, engine_process
from tests.integration.proxy.harness import body, serving, text, until
from tests.integration.proxy.scripted import DONE


@dataclass
class Split:
    """A proxy in front of processes."""

    proxy: Proxy
    client: httpx.AsyncClient
    prefills: list[EngineProcess]
    decodes: list[EngineProcess]

    def ask(self, words: str = "hi", tokens: int = 1) -> asyncio.Task[httpx.Response]:
        request = body(text(words), stream=True, max_tokens=tokens)
        return asyncio.create_task(self.client.post("/v1/chat/completions", json=request))

    async def until_at(self, role: str, index: int) -> None:
        """Until the instance has a request."""
        instance = list(self.proxy.roles[role].pool)[index]

        async def has_one() -> bool:
            return instance.outstanding > 0

        await until(has_one)


Make = Callable[..., Awaitable[Split]]


@pytest.fixture
async def split() -> AsyncIterator[Make]:
    """Starts them: `await split(prefills=2, decodes=1, decode=0.5)`; the rest are limits."""
    async with AsyncExitStack() as stack:

        async def make(prefills: int = 1, decodes: int = 1, **limits: Any) -> Split:
            started = {
                role: [await stack.enter_async_context(engine_process(role)) for _ in range(count)]
                for role, count in (("prefill", prefills), ("decode", decodes))
            }
            origins = {role: tuple(Origin.parse(one.url) for one in ones) for role, ones in started.items()}
            proxy = Proxy(Config(origins, limits=Limits(**limits)))
            url = await stack.enter_async_context(serving(proxy))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            return Split(proxy, client, started["prefill"], started["decode"])

        yield make


def is_whole(answer: httpx.Response, prefill: EngineProcess, decode: EngineProcess) -> bool:
    said = f"from {prefill.url} by {decode.process.pid}".encode()
    return answer.status_code == 200 and said in answer.content and answer.content.endswith(DONE)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_prefill_killed_at_work_is_done_by_another(split: Make):
    s = await split(prefills=2)
    s.prefills[0].stop()
    asked = s.ask()
    await s.until_at("prefill", 0)
    await s.prefills[0].kill()
    assert is_whole(await asked, s.prefills[1], s.decodes[0])


async def test_the_only_prefill_killed_at_work_is_503_before_any_byte(split: Make):
    s = await split()
    asked = s.ask("a long prompt")
    await s.until_at("prefill", 0)
    await s.prefills[0].kill()
    answer = await asked
    assert refusal(answer) == (503, "upstream_disconnected")
    assert "retry-after" in answer.headers
    assert refusal(await s.ask()) == (503, "no_prefill_available")


async def test_prefill_killed_before_its_kv_was_taken_is_done_again_by_another(split: Make):
    s = await split(prefills=2)
    s.decodes[0].stop()
    asked = s.ask()
    await s.until_at("decode", 0)
    await s.prefills[0].kill()
    s.decodes[0].go_on()
    assert is_whole(await asked, s.prefills[1], s.decodes[0])


async def test_the_only_prefill_killed_before_its_kv_was_taken_is_503(split: Make):
    s = await split()
    s.decodes[0].stop()
    asked = s.ask()
    await s.until_at("decode", 0)
    await s.prefills[0].kill()
    s.decodes[0].go_on()
    assert refusal(await asked) == (503, "no_prefill_available")


async def test_prefill_that_is_stopped_is_504_and_used_again_when_it_goes_on(split: Make):
    s = await split(prefill=0.5)
    s.prefills[0].stop()
    assert refusal(await s.ask()) == (504, "prefill_timeout")
    s.prefills[0].go_on()

    async def serves() -> bool:
        return is_whole(await s.ask(), s.prefills[0], s.decodes[0])

    await until(serves)


async def test_decode_killed_before_its_first_event_is_done_again_by_another(split: Make):
    s = await split(prefills=2, decodes=2)
    s.decodes[0].stop()
    asked = s.ask()
    await s.until_at("decode", 0)
    await s.decodes[0].kill()
    assert is_whole(await asked, s.prefills[1], s.decodes[1])


async def test_the_only_decode_killed_before_its_first_event_is_503(split: Make):
    s = await split()
    s.decodes[0].stop()
    asked = s.ask()
    await s.until_at("decode", 0)
    await s.decodes[0].kill()
    assert refusal(await asked) == (503, "no_decode_available")


async def test_decode_killed_in_the_middle_ends_the_stream_in_an_error_event(split: Make):
    s = await split(decodes=2)
    request = body(text("hi"), stream=True, max_tokens=10_000)
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        pieces = answer.aiter_bytes()
        said = await anext(pieces)
        await s.decodes[0].kill()
        said += b"".join([piece async for piece in pieces])
    assert answer.status_code == 200
    last = said.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"
    assert is_whole(await s.ask(), s.prefills[0], s.decodes[1])


async def test_decode_stopped_in_the_middle_ends_the_stream_in_an_error_event(split: Make):
    s = await split(idle=0.5)
    request = body(text("hi"), stream=True, max_tokens=10_000)
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        pieces = answer.aiter_bytes()
        said = await anext(pieces)
        s.decodes[0].stop()
        said += b"".join([piece async for piece in pieces])
    last = said.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_timeout"


async def test_decode_that_is_stopped_is_504_and_nothing_stays_counted(split: Make):
    s = await split(decode=0.5)
    s.decodes[0].stop()
    assert refusal(await s.ask()) == (504, "decode_timeout")
    assert [one.outstanding for role in s.proxy.roles.values() for one in role.pool] == [0, 0]
