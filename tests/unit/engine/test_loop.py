"""The engine's thread, with an engine that only notes what comes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from epd_engine import loop as loop_module
from epd_engine.core.output import RequestUpdate
from epd_engine.core.request import FinishReason, Request
from epd_engine.engine import Engine
from epd_engine.loop import EngineLoop
from tests.support.engine_objects import request

LONG = 60.0  # seconds that no test takes


class Notes:
    """Ends every request in the step that it comes to, and remembers which came together."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.added: list[str] = []
        self.is_stalled = False

    @property
    def has_work(self) -> bool:
        return bool(self.added)

    def add(self, request: Request) -> None:
        if request.request_id == "poison":
            raise OSError("the store says no")
        self.added.append(request.request_id)

    def step(self) -> list[RequestUpdate]:
        if "fatal" in self.added:
            raise SystemError("the books are lost")
        done, self.added = self.added, []
        if done:
            self.steps.append(done)
        return [RequestUpdate(one, finish_reason=FinishReason.STOP) for one in done]

    def abort(self, request_id: str) -> None: ...

    def smoke(self) -> None: ...

    def on_progress(self, wake: Callable[[], None]) -> None: ...

    def shutdown(self) -> None: ...


@asynccontextmanager
async def running() -> AsyncIterator[tuple[EngineLoop, Notes]]:
    notes = Notes()
    loop = EngineLoop(lambda: cast(Engine, notes))
    loop.start(lambda: None)
    await loop.wait_ready()
    yield loop, notes
    await loop.stop()


async def answered(loop: EngineLoop, name: str) -> None:
    async for _ in loop.updates(request(name, 4)):
        pass


async def arrived(notes: Notes, count: int) -> None:
    while len(notes.added) < count:  # noqa: ASYNC110 - another thread's list
        await asyncio.sleep(0.001)


def given(test: Callable[[EngineLoop, Notes], Awaitable[Any]]) -> None:
    async def run() -> None:
        async with running() as (loop, notes):
            await asyncio.wait_for(test(loop, notes), LONG / 2)

    asyncio.run(run())


def test_requests_that_are_on_their_way_start_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "GATHER_SECONDS", LONG)

    async def come_together(loop: EngineLoop, notes: Notes) -> None:
        async with asyncio.TaskGroup() as group:
            with loop.arriving():
                group.create_task(answered(loop, "first"))
                await arrived(notes, 1)
                group.create_task(answered(loop, "second"))
                await arrived(notes, 2)
                assert notes.steps == []
        assert notes.steps == [["first", "second"]]

    given(come_together)


def test_a_request_does_not_wait_where_none_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "GATHER_SECONDS", LONG)

    async def come_alone(loop: EngineLoop, notes: Notes) -> None:
        with loop.arriving():  # and is refused
            pass
        await answered(loop, "only")
        assert notes.steps == [["only"]]

    given(come_alone)


def test_who_is_long_on_the_way_is_not_waited_for() -> None:
    async def come_late(loop: EngineLoop, notes: Notes) -> None:
        with loop.arriving():
            await answered(loop, "first")
        await answered(loop, "late")
        assert notes.steps == [["first"], ["late"]]

    given(come_late)


async def end_of(loop: EngineLoop, name: str) -> RequestUpdate:
    (update,) = [update async for update in loop.updates(request(name, 4))]
    return update


def test_a_request_that_cannot_be_taken_ends_by_itself() -> None:
    async def go_on(loop: EngineLoop, notes: Notes) -> None:
        error = (await end_of(loop, "poison")).error
        assert error is not None
        assert (error.status, error.code) == (500, "internal_error")
        await answered(loop, "next")
        assert notes.steps == [["next"]]

    given(go_on)


def test_who_comes_after_the_engine_has_ended_is_told_so() -> None:
    async def come_too_late(loop: EngineLoop, notes: Notes) -> None:
        for name in ("fatal", "late"):
            error = (await end_of(loop, name)).error
            assert error is not None
            assert (error.status, error.code) == (503, "shutting_down")
        assert isinstance(loop.failure, SystemError)

    given(come_too_late)
