"""Being told to end: once, twice, and until the time is over."""

import asyncio

from epd_engine.server.drain import Drain


def told(seconds: float) -> tuple[Drain, asyncio.Event]:
    drain, over = Drain(seconds), asyncio.Event()
    drain.on_over = over.set
    drain.tell()
    return drain, over


async def test_the_time_is_over_by_itself() -> None:
    drain, over = told(0.01)
    assert not drain.is_over
    await asyncio.wait_for(over.wait(), 10)
    assert drain.is_over


async def test_a_second_word_does_not_wait() -> None:
    drain, over = told(600)
    assert not drain.is_over
    drain.tell()
    assert drain.is_over
    assert over.is_set()


async def test_it_is_over_once() -> None:
    ends = []
    drain = Drain(0.0)
    drain.on_over = lambda: ends.append(1)
    for _ in range(4):
        drain.tell()
    await asyncio.sleep(0.05)
    assert ends == [1]
