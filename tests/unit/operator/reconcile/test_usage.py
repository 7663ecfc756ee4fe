"""What janitors say of their stores: what is believed, what is news, and whom it can harm."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from epd_operator.apply.kinds import POD, RESOURCE
from epd_operator.handlers import usage as poller
from epd_operator.handlers.cache import Cache, Key
from epd_operator.handlers.metrics import Metrics
from epd_operator.handlers.usage import UsagePoller
from epd_operator.status.usage import Usage, read_usage, reported

GI = 1 << 30
KEY, OTHER = Key("n", "demo"), Key("n", "other")
GOOD = {"bytes": 5 * GI, "entries": 7, "capacity": 10 * GI}


def test_more_than_is_known_may_be_said() -> None:
    body = json.dumps({**GOOD, "quarantined": 3, "tiers": {"memory": {}}}).encode()
    assert read_usage(body) == Usage(bytes=5 * GI, entries=7, capacity=10 * GI)
    assert read_usage(b'{"bytes": 1, "entries": 1, "capacity": null}').capacity is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b'{"bytes": 1}',
        b'{"bytes": -1, "entries": 1}',
        b'{"bytes": 1.5, "entries": 1}',
        b'{"bytes": "1", "entries": 1}',
        b'{"bytes": true, "entries": 1}',
        b'{"bytes": 1e400, "entries": 1}',
        b'{"bytes": NaN, "entries": 1}',
        b'{"bytes": 9223372036854775808, "entries": 1}',
        b'{"bytes": ' + b"9" * 50_000 + b', "entries": 1}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"bytes": 1, "entries": 1, "x": "' + b"x" * 70_000 + b'"}',
        b'{"bytes": 1, "entries": 1, "x": "\xff"}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_cannot_be_is_refused_in_few_words(body: bytes) -> None:
    with pytest.raises(ValueError) as caught:
        read_usage(body)
    assert len(str(caught.value)) < 300


def status_of(usage: Usage) -> dict[str, Any]:
    found = reported(None, usage)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [
        ((5 * GI, 10 * GI), (5 * GI, 10 * GI), False),
        ((5 * GI, 10 * GI), (5 * GI + GI // 20, 10 * GI), False),
        ((5 * GI, 10 * GI), (5 * GI + GI // 10, 10 * GI), True),
        ((5 * GI, 10 * GI), (5 * GI - GI // 10, 10 * GI), True),
        ((5 * GI, 10 * GI), (5 * GI, 10 * GI + 1), False),
        ((5 * GI, 10 * GI), (5 * GI, 12 * GI), True),
        ((5 * GI, 10 * GI), (5 * GI, None), True),
        ((5 * GI, None), (5 * GI, 10 * GI), True),
        ((0, 10 * GI), (1, 10 * GI), True),
        ((1, 10 * GI), (0, 10 * GI), True),
        ((5 * GI, None), (5 * GI + GI // 50, None), False),
        ((5 * GI, None), (6 * GI, None), True),
        ((100, None), (200, None), False),
        ((5, 0), (5, 0), False),
    ],
)
def test_what_is_news(before: tuple[int, int | None], after: tuple[int, int | None], is_news: bool) -> None:
    old, new = (Usage(bytes=size, entries=9, capacity=capacity) for size, capacity in (before, after))
    expected = status_of(new) if is_news else status_of(old)
    assert reported(status_of(old), new) == expected


SIZES = st.integers(0, 2**63 - 1)


@given(SIZES, SIZES, SIZES | st.none(), SIZES | st.none())
def test_news_is_news_once(one: int, other: int, first: int | None, second: int | None) -> None:
    old = status_of(Usage(bytes=one, entries=1, capacity=first))
    new = Usage(bytes=other, entries=2, capacity=second)
    told = reported(old, new)
    assert told in (old, status_of(new))
    assert reported(told, new) == told


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def janitor(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> AsyncIterator[list[web.Request]]:
    """A janitor that answers as it is told to, at the port that janitors have here; what it was asked."""
    asked: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        return await answer(request)

    application = web.Application()
    application.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    monkeypatch.setattr(poller, "PORT", site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
    try:
        yield asked
    finally:
        await runner.cleanup()


def known(**pod: Any) -> Cache:
    """A resource with the pod of its janitor, and one whose janitor is nowhere."""
    cache = Cache()
    for key in (KEY, OTHER):
        cache.put(RESOURCE, {"metadata": _metadata(key.name, {})})
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/component": "janitor"}
    found = {"metadata": _metadata("p", labels), "status": {"podIP": "127.0.0.1"}}
    cache.put(POD, found | pod)
    return cache


def _metadata(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1", "labels": labels}


class Polling:
    """A poller at work."""

    def __init__(self, cache: Cache) -> None:
        self.metrics = Metrics()
        self.changed: list[Key] = []
        self.poller = UsagePoller(cache, self.metrics, 0.01, self.changed.append)
        self._task = asyncio.create_task(self.poller.run())

    def looks(self, result: str) -> float:
        return (
            self.metrics.registry.get_sample_value("epd_operator_usage_looks_total", {"result": result})
            or 0.0
        )

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not true():
                assert not self._task.done(), self._task.result()
                await asyncio.sleep(0.01)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_news_is_told_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = known()

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(GOOD)

    async with janitor(monkeypatch, answer) as asked:
        polling = Polling(cache)
        await polling.until(lambda: len(polling.changed) >= 2)
        assert set(polling.changed) == {KEY}
        usage = polling.poller.latest(KEY)
        assert usage == Usage(bytes=5 * GI, entries=7, capacity=10 * GI)
        assert polling.poller.latest(OTHER) is None
        assert "Authorization" not in asked[0].headers
        metadata = _metadata("demo", {}) | {"resourceVersion": "2"}
        cache.put(RESOURCE, {"metadata": metadata, "status": {"store": reported(None, usage)}})
        seen, looks = len(polling.changed), polling.looks("ok")
        await polling.until(lambda: polling.looks("ok") >= looks + 3)
        assert len(polling.changed) == seen
        cache.remove(RESOURCE, {"metadata": metadata})
        await polling.until(lambda: polling.poller.latest(KEY) is None)
        await polling.end()


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"9" * 65536)


async def _redirects(request: web.Request) -> web.StreamResponse:
    if request.path == "/elsewhere":
        return web.json_response(GOOD)
    raise web.HTTPFound("/elsewhere")


async def _bomb(_: web.Request) -> web.StreamResponse:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return web.Response(body=json.dumps(GOOD).encode(), headers=headers)


async def _fails(_: web.Request) -> web.StreamResponse:
    return web.json_response(GOOD, status=503)


async def _negative(_: web.Request) -> web.StreamResponse:
    return web.json_response({**GOOD, "bytes": -1})


async def _hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _silent(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


@pytest.mark.parametrize(
    "answer",
    [_endless, _redirects, _fails, _negative, _hangs_up, _silent],
    ids=lambda answer: answer.__name__,
)
async def test_a_janitor_that_is_broken_costs_a_look(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(poller, "_TIMEOUT_S", 0.2)
    async with janitor(monkeypatch, answer) as asked:
        polling = Polling(known())
        await polling.until(lambda: polling.looks("failed") >= 2)
        assert polling.changed == []
        assert polling.poller.latest(KEY) is None
        assert {request.path for request in asked} == {"/usage"}
        await polling.end()


async def test_nothing_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes could be many otherwise."""
    async with janitor(monkeypatch, _bomb) as asked:
        polling = Polling(known())
        await polling.until(lambda: polling.looks("ok") >= 1)
        assert asked[0].headers["Accept-Encoding"] == "identity"
        await polling.end()


@pytest.mark.parametrize(
    "pod",
    [
        {"status": {}},
        {"status": {"podIP": "127.0.0.1", "phase": "Failed"}},
        {"metadata": _metadata("p", {"app.kubernetes.io/instance": "demo"})},
    ],
    ids=["no address yet", "over", "another pod"],
)
async def test_whom_nobody_asks(monkeypatch: pytest.MonkeyPatch, pod: dict[str, Any]) -> None:
    async with janitor(monkeypatch, _fails) as asked:
        polling = Polling(known(**pod))
        await asyncio.sleep(0.1)
        assert asked == []
        await polling.end()
