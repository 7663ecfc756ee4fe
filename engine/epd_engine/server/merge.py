"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. The first error of any ends them all, as does closing this one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        for _ in streams:
            while not isinstance(got := await queue.get(), _End):
                yield got
            if got.error is not None:
                raise got.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    def __init__(self, error: Exception | None = None):
        self.error = error


async def _pump(stream: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _End]") -> None:
    end = _End()
    try:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)
    except Exception as error:  # noqa: BLE001 - raised again where the streams are read
        end = _End(error)
    queue.put_nowait(end)
