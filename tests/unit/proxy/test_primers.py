"""Single flight, decided over encoders that answer when told to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from epd_proxy.config import Origin
from epd_proxy.errors import EngineAnswer, ProxyError, Unavailable
from epd_proxy.media import MediaItem, Place, Primed
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Pool
from epd_proxy.primers import Primers


class Gated:
    """Stands in for `Encoders`: every call waits for its own future."""

    def __init__(self, instances: int = 1) -> None:
        self.role = SimpleNamespace(pool=Pool("encoder"))
        for port in range(instances):
            instance = self.role.pool.add(Origin.parse(f"http://e:{port + 1}"))
            self.role.pool.probed(instance, 0, True, "ready")
        self.calls: list[tuple[list[str], asyncio.Future]] = []

    async def encode(self, call, items, lease):
        names = [item.part["name"] for item in items]
        answer = asyncio.get_running_loop().create_future()
        self.calls.append((names, answer))
        version = await answer
        return [Primed(f"{name}-{version}", {"n": 1}) for name in names]

    @property
    def loads(self) -> list[int]:
        return [instance.outstanding for instance in self.role.pool]


def item(name: str, remote: bool = False) -> MediaItem:
    return MediaItem(Place(0, 0), "image", {"name": name}, remote)


def start(primers: Primers, *names: str, fresh: bool = False, seen_by: str = "") -> asyncio.Task:
    """`fresh`: after a miss of what the encoder at the URL `seen_by` answered."""
    keys = [name.encode() for name in names]
    missed = [Primed(name, {}, seen_by) for name in names] if fresh else None
    return asyncio.ensure_future(primers.prime(None, [item(name) for name in names], keys, missed=missed))


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def encoders() -> Gated:
    return Gated()


@pytest.fixture
def primers(encoders: Gated) -> Primers:
    return Primers(encoders, Metrics())


async def test_a_fresh_primer_does_not_join_one_from_before_the_miss(encoders, primers):
    older = start(primers, "a")
    await settle()
    fresh = start(primers, "a", fresh=True)
    await settle()
    assert [names for names, _ in encoders.calls] == [["a"], ["a"]]
    encoders.calls[1][1].set_result("new")
    assert (await fresh)[0].mm_hash == "a-new"
    encoders.calls[0][1].set_result("old")
    assert (await older)[0].mm_hash == "a-old"
    assert (await start(primers, "a"))[0].mm_hash == "a-new"  # the older answer does not replace it


async def test_fresh_primers_join_each_other_and_others_join_them(encoders, primers):
    tasks = [start(primers, "a", fresh=True), start(primers, "a", fresh=True), start(primers, "a")]
    await settle()
    encoders.calls[0][1].set_result("new")
    assert {primed[0].mm_hash for primed in await asyncio.gather(*tasks)} == {"a-new"}
    assert len(encoders.calls) == 1


async def test_after_a_miss_an_item_goes_to_another_encoder_where_there_is_one():
    encoders = Gated(instances=2)
    primers = Primers(encoders, Metrics())
    tasks = [start(primers, "a", "b", fresh=True, seen_by="http://e:1")]
    await asyncio.sleep(0)
    assert encoders.loads == [0, 2]
    encoders.role.pool.remove(Origin.parse("http://e:2"))
    tasks.append(start(primers, "c", fresh=True, seen_by="http://e:1"))
    await asyncio.sleep(0)
    assert encoders.loads == [1]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_joins_some_items_and_sends_the_others(encoders, primers):
    first = start(primers, "a", "b")
    await settle()
    second = start(primers, "b", "c", "b")
    await settle()
    assert [names for names, _ in encoders.calls] == [["a", "b"], ["c"]]
    for _, answer in encoders.calls:
        answer.set_result("1")
    assert [p.mm_hash for p in await second] == ["b-1", "c-1", "b-1"]
    await first


async def test_work_is_counted_from_the_choice_until_the_end(encoders):
    encoders = Gated(instances=2)
    primers = Primers(encoders, Metrics())
    tasks = [start(primers, "a", "b", "c"), start(primers, "d")]
    await asyncio.sleep(0)  # the calls were chosen, and none has begun
    assert encoders.loads == [2, 2]
    await settle()
    assert [names for names, _ in encoders.calls] == [["a", "c"], ["b"], ["d"]]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle()
    assert encoders.loads == [0, 0]


async def test_a_primer_is_cancelled_when_nobody_waits_and_a_newcomer_starts_its_own(encoders, primers):
    first, second = start(primers, "a"), start(primers, "a")
    await settle()
    first.cancel()
    await settle()
    assert not encoders.calls[0][1].cancelled()
    second.cancel()
    third = start(primers, "a")
    await settle()
    assert encoders.calls[0][1].cancelled()
    encoders.calls[1][1].set_result("2")
    assert (await third)[0].mm_hash == "a-2"


async def test_a_failure_of_the_stage_is_shared_and_not_remembered(encoders, primers):
    tasks = [start(primers, "a", "b"), start(primers, "a")]
    await settle()
    encoders.calls[0][1].set_exception(ProxyError(504, "slow", code="encoder_timeout"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result.status for result in results] == [504, 504]
    again = start(primers, "a")
    await settle()
    encoders.calls[1][1].set_result("2")
    assert (await again)[0].mm_hash == "a-2"


async def test_who_joined_a_refused_primer_asks_once_on_its_own(encoders, primers):
    tasks = [start(primers, "a"), start(primers, "a"), start(primers, "a")]
    await settle()
    encoders.calls[0][1].set_exception(EngineAnswer(400, [], b"first"))
    await settle()
    encoders.calls[1][1].set_exception(EngineAnswer(400, [], b"second"))
    encoders.calls[2][1].set_result("3")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(result, "body", result) for result in results] == [
        b"first",
        b"second",
        [Primed("a-3", {"n": 1})],
    ]
    assert len(encoders.calls) == 3


async def test_full_encoders_are_not_asked_again_by_those_who_joined(encoders, primers):
    tasks = [start(primers, "a", "b"), start(primers, "a")]
    await settle()
    encoders.calls[0][1].set_exception(EngineAnswer(429, [], b"{}"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [result.status for result in results] == [429, 429]
    assert len(encoders.calls) == 1


async def test_one_failed_batch_ends_the_others_of_its_request():
    encoders = Gated(instances=2)
    primers = Primers(encoders, Metrics())
    task = start(primers, "a", "b")
    await settle()
    encoders.calls[0][1].set_exception(EngineAnswer(400, [], b"{}"))
    with pytest.raises(EngineAnswer):
        await task
    await settle()
    assert encoders.calls[1][1].cancelled()
    assert encoders.loads == [0, 0]


async def test_what_lies_behind_a_url_is_not_remembered(encoders, primers):
    for version in ("1", "2"):
        task = asyncio.ensure_future(primers.prime(None, [item("u", remote=True)], [b"u"]))
        await settle()
        encoders.calls[-1][1].set_result(version)
        assert (await task)[0].mm_hash == f"u-{version}"


async def test_without_a_ready_encoder_nothing_is_sent(primers, encoders):
    for instance in encoders.role.pool:
        encoders.role.pool.lost(instance, "gone")
    with pytest.raises(Unavailable, match="no encoder"):
        await start(primers, "a")
    assert not encoders.calls
