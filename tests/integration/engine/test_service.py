"""The service in the test's own process: clients that leave, and faults, at a chosen moment."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from epd_engine.config import EngineConfig, MediaLimits
from epd_engine.core.request import RequestError
from epd_engine.engine import Engine
from epd_engine.loop import EngineLoop
from epd_engine.server import prompt
from epd_engine.server.app import Service, create_app
from epd_engine.server.drain import Drain
from epd_engine.server.text import TextStream
from tests.support.digits import MODEL, shipped, user
from tests.support.engines import MODEL_NAME
from tests.support.in_process import InProcess

PATH = "/v1/chat/completions"
BODY = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Hello, who are you?"}],
    "max_tokens": 900,
    "temperature": 1,
    "ignore_eos": True,
}


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[FastAPI, Service]]:
    """One thread for media, so that what holds it holds all of them."""
    config = EngineConfig(
        str(MODEL),
        served_model_names=(MODEL_NAME,),
        max_model_len=1024,
        kv_cache_tokens=8192,
        media=MediaLimits(workers=1),
    )
    service = Service(config, EngineLoop(lambda: Engine(config)), Drain(1))
    app = create_app(service, lambda: None)
    async with app.router.lifespan_context(app):
        await until(lambda: service.is_ready)
        yield app, service


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine's thread tells nobody
            await asyncio.sleep(0.01)


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }


# It leaves while its request is made ready, or as soon as any choice has come to the engine.
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
async def test_all_choices_are_freed_whenever_the_client_leaves(begun: int, stream: bool, n: int) -> None:
    async with serving() as (app, service):
        body = json.dumps({**BODY, "n": n, "stream": stream}).encode()
        arriving = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if arriving:
                return arriving.pop()
            await until(lambda: service.loop.num_requests >= begun)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(scope(), receive, send)
        assert service.loop.num_requests == 0
        engine = service.loop.engine
        assert engine is not None
        await until(lambda: not engine.has_work)
        assert engine.stats.generated_tokens < n * 100
        assert sent[0]["status"] == 499 or stream


async def test_a_stream_that_fails_ends_with_an_error_event_and_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push, pieces = TextStream.push, iter(range(3))

    def fails(self: TextStream, *arguments: Any, **options: Any) -> str:
        if next(pieces, None) is None:
            raise ZeroDivisionError("a fault of ours")
        return push(self, *arguments, **options)

    monkeypatch.setattr(TextStream, "push", fails)
    async with serving() as (app, service):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            answer = await client.post(PATH, json={**BODY, "stream": True, "logprobs": True}, timeout=60)
        assert answer.status_code == 200
        events = answer.text.split("\n\n")[:-1]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "a fault of ours" not in error["message"]
        assert len(events) == 1 + 3 + 1  # the role, what went well, the error
        assert "ZeroDivisionError: a fault of ours" in caplog.text
        assert b'epd_engine_stream_errors_total{code="internal_error"} 1.0' in service.metrics.render()
        assert service.loop.num_requests == 0


async def test_text_does_not_wait_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, decode = threading.Event(), prompt.decode_image

    def slow(*arguments: Any) -> Any:
        answered.wait(60)
        return decode(*arguments)

    monkeypatch.setattr(prompt, "decode_image", slow)
    async with (
        serving() as (app, _),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client,
    ):
        picture = {**BODY, "messages": [user(shipped("seven"))], "max_tokens": 1}
        seen = asyncio.create_task(client.post(PATH, json=picture, timeout=90))
        await asyncio.sleep(0.1)
        try:
            text = await asyncio.wait_for(client.post(PATH, json={**BODY, "max_tokens": 1}), 30)
        finally:
            answered.set()
        assert text.status_code == 200
        assert (await seen).status_code == 200


def test_a_stored_items_claim_takes_no_memory_before_it_is_refused(tmp_path: Path) -> None:
    reader = InProcess(MODEL, role="ec_consumer", store=tmp_path, max_model_len=1024, kv_cache_tokens=4096)
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 16384, 16384]}, "uuid": "ab" * 32}
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="the model's context is 1024") as caught:
            reader.build([{"messages": [{"role": "user", "content": [part]}]}])
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        reader.close()
    assert caught.value.code == "context_length_exceeded"
