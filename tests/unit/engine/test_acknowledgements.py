"""Whoever published a picture for a request hears once that it is needed no more, however that came about."""

from dataclasses import replace

import pytest

from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.remote_kv import RemotePrefill
from epd_engine.core.request import Request
from epd_engine.server.chat import _choices
from tests.support.engine_objects import SetConnector, item, key, request
from tests.unit.engine.test_scheduler import Bench

A = key("a")


def asked(name: str, *names: str, pixels: bool = False) -> Request:
    """A request of one picture of 4 embeddings for each of `names`."""
    media = [item(n, 1 + 6 * i, 4, pixels=pixels) for i, n in enumerate(names)]
    return request(name, 2 + 6 * len(names), media)


@pytest.fixture
def bench() -> Bench:
    return Bench(stored={key(n) for n in "abcd"}, can_compute=True)


def told(bench: Bench) -> list[str]:
    assert bench.connector is not None
    return bench.connector.acknowledged


def test_a_load_says_so_by_itself(bench: Bench) -> None:
    bench.scheduler.add(asked("r", "a", "a"))
    bench.run()
    assert bench.connector is not None
    assert bench.connector.loads == [A]
    assert told(bench) == []


def test_a_picture_that_is_resident_already(bench: Bench) -> None:
    bench.scheduler.add(asked("first", "a"))
    bench.run()
    second = asked("second", "b", "a")
    bench.scheduler.add(second)
    bench.step()
    assert told(bench) == [A], "as soon as it is placed, not when the answer ends"
    bench.run()
    assert told(bench) == [A]


def test_a_picture_whose_kv_is_known(bench: Bench) -> None:
    for name in ("first", "second"):
        bench.scheduler.add(asked(name, "a"))
        bench.run()
    assert bench.connector is not None
    assert bench.connector.loads == [A]
    assert told(bench) == [A]


def test_a_picture_that_was_never_reached(bench: Bench) -> None:
    bench.scheduler.add(asked("r", "a"))
    bench.scheduler.abort("r")
    assert told(bench) == [A]


def test_a_preempted_request_says_nothing_twice(bench: Bench) -> None:
    crowded = Bench(stored={key(n) for n in "abcd"}, blocks=6)
    for name in ("r", "s"):
        crowded.scheduler.add(replace(asked(name, "a"), sampling=request("", 1, max_tokens=12).sampling))
    crowded.run()
    assert told(crowded) == [A], "once for the one that did not load it"


def test_nobody_waits_for_what_came_as_pixels(bench: Bench) -> None:
    for name in ("first", "second"):
        bench.scheduler.add(asked(name, "a", pixels=True))
        bench.run()
    assert told(bench) == []


def test_choices_of_one_request_have_one_publication(bench: Bench) -> None:
    for choice in _choices(asked("r", "a"), 3):
        bench.scheduler.add(choice)
    bench.run()
    assert told(bench) == []


def test_decode_leaves_it_to_prefill() -> None:
    connector = SetConnector({A})
    planner = MediaPlanner(EncoderCacheManager(32), connector, max_encoder_embeds=16, can_compute=False)
    planner.forget(replace(asked("r", "a"), kv=RemotePrefill("p", "0" * 64, 8, 3)))
    assert connector.acknowledged == []
    planner.forget(asked("s", "a"))
    assert connector.acknowledged == [A]
