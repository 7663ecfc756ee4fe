"""Several streams as one: order within each, the first error, nothing left behind."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from epd_engine.server.merge import merged


class Source:
    """A stream of `count` items that ends, fails or waits for ever, and knows that it was closed."""

    def __init__(self, name: str, count: int, end: str = "ends"):
        self.name, self.count, self.end, self.closed = name, count, end, False

    async def stream(self) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for item in range(self.count):
                await asyncio.sleep(0)
                yield self.name, item
            if self.end == "fails":
                raise ValueError(self.name)
            if self.end == "waits":
                await asyncio.sleep(3600)
        finally:
            self.closed = True


async def read(*sources: Source) -> list[tuple[str, int]]:
    async with aclosing(merged([source.stream() for source in sources])) as items:
        return [item async for item in items]


@pytest.mark.parametrize("counts", [[3], [0], [3, 5], [0, 2, 0], [4, 4, 4, 4]])
async def test_all_items_come_in_their_order(counts: list[int]) -> None:
    sources = [Source(str(at), count) for at, count in enumerate(counts)]
    got = await read(*sources)
    for source in sources:
        assert [item for name, item in got if name == source.name] == list(range(source.count))
        assert source.closed


@pytest.mark.parametrize("others", [[], ["waits"], ["ends", "waits", "waits"]])
async def test_the_first_error_ends_them_all(others: list[str]) -> None:
    sources = [Source("bad", 2, "fails"), *(Source(f"other {i}", 1, end) for i, end in enumerate(others))]
    with pytest.raises(ValueError, match="bad"):
        await read(*sources)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_early_closes_every_stream(count: int) -> None:
    sources = [Source(str(at), 2, "waits") for at in range(count)]
    items = merged([source.stream() for source in sources])
    await anext(items)
    await items.aclose()
    assert all(source.closed for source in sources)
    assert asyncio.all_tasks() == {asyncio.current_task()}
