import sys
import threading
from collections.abc import Iterator

import pytest

from epd_engine.core.encoder_cache_manager import EncoderCacheManager, EncoderCacheMoves
from tests.support.engine_objects import item, key, request


def test_a_repeated_picture_keeps_its_reference_until_its_last_occurrence() -> None:
    """vllm#54284: counting requests instead of occurrences frees it early."""
    cache = EncoderCacheManager(10)
    twice = request("r", 20, [item("a", 0, 4), item("a", 8, 4)])
    assert cache.allocate(twice, 0)
    assert cache.reference_if_cached(twice, 1)
    cache.take_moves()
    cache.release(twice, 0)
    assert cache.num_referenced == 4
    other = request("s", 20, [item("b", 0, 10)])
    assert not cache.allocate(other, 0)
    cache.release(twice, 1)
    assert cache.num_referenced == 0
    assert cache.allocate(other, 0)
    assert cache.take_moves().freed == [key("a")]


def test_what_nobody_references_stays_until_room_is_needed() -> None:
    cache = EncoderCacheManager(10)
    first = request("r", 20, [item("a", 0, 4)])
    assert cache.allocate(first, 0)
    cache.release_all(first)
    again = request("s", 20, [item("a", 0, 4)])
    assert cache.reference_if_cached(again, 0)
    assert cache.take_moves().freed == []


def test_the_least_recently_released_goes_first() -> None:
    cache = EncoderCacheManager(9)
    holders = [request(n, 20, [item(n, 0, 3)]) for n in "abc"]
    for holder in holders:
        assert cache.allocate(holder, 0)
    cache.take_moves()
    for holder in (holders[1], holders[0], holders[2]):
        cache.release_all(holder)
    assert cache.allocate(request("r", 20, [item("d", 0, 6)]), 0)
    assert cache.take_moves().freed == [key("b"), key("a")]


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    cache = EncoderCacheManager(9)
    a, b = request("r", 9, [item("a", 0, 5)]), request("s", 9, [item("b", 0, 4)])
    assert cache.allocate(a, 0)
    assert cache.allocate(b, 0)
    cache.release_all(b)
    assert not cache.allocate(request("t", 9, [item("c", 0, 5)]), 0)
    assert cache.take_moves().freed == []
    assert cache.reference_if_cached(b, 0)


def test_a_key_that_is_claimed_with_another_size_is_told_apart() -> None:
    cache = EncoderCacheManager(9)
    assert cache.allocate(request("r", 9, [item("a", 0, 5)]), 0)
    assert cache.conflicts(item("a", 2, 4))
    assert not cache.conflicts(item("a", 2, 5))
    assert not cache.conflicts(item("b", 2, 4))


def test_an_item_that_never_came_is_forgotten_with_its_references() -> None:
    cache = EncoderCacheManager(9)
    a = request("r", 9, [item("a", 0, 5)])
    assert cache.allocate(a, 0)
    cache.drop(key("a"))
    assert cache.num_used == cache.num_referenced == 0
    cache.release_all(a)  # harmless afterwards
    assert cache.allocate(a, 0)


def test_what_is_planned_in_a_step_is_not_evicted_within_it() -> None:
    """Its request may end while the step is planned; freeing comes before loading: it would stay forever."""
    cache = EncoderCacheManager(9)
    a, b = request("r", 9, [item("a", 0, 5)]), request("s", 9, [item("b", 0, 5)])
    assert cache.allocate(a, 0)
    cache.release_all(a)
    assert not cache.allocate(b, 0)
    assert cache.take_moves().is_empty
    assert cache.allocate(b, 0)
    assert cache.take_moves() == EncoderCacheMoves(freed=[key("a")])


def test_an_evicted_item_that_nobody_could_make_again_is_set_aside_until_its_requests_end() -> None:
    cache = EncoderCacheManager(9)
    a, b = request("r", 9, [item("a", 0, 5)]), request("s", 9, [item("b", 0, 5)])
    twin = request("t", 9, [item("a", 0, 5)])
    for one in (a, b, twin):
        cache.expect(one)
    assert cache.allocate(a, 0)
    cache.take_moves()
    cache.release(a, 0)
    assert cache.allocate(b, 0)
    assert cache.take_moves() == EncoderCacheMoves(set_aside=[key("a")])
    assert cache.num_aside == 5
    assert cache.conflicts(item("a", 2, 4))
    assert not cache.bring_back(a, 0), "there is no room"
    cache.forget(b)
    assert cache.bring_back(a, 0)
    assert cache.take_moves() == EncoderCacheMoves(freed=[key("b")], brought_back=[key("a")])
    cache.forget(a)
    assert cache.allocate(b, 0)
    assert cache.take_moves() == EncoderCacheMoves(set_aside=[key("a")]), "the twin may need it"
    cache.forget(twin)
    assert cache.take_moves() == EncoderCacheMoves(freed=[key("a")])


def test_an_item_that_is_set_aside_and_wanted_no_more_in_one_step_is_only_freed() -> None:
    cache = EncoderCacheManager(9)
    a, b = request("r", 9, [item("a", 0, 5)]), request("s", 9, [item("b", 0, 5)])
    cache.expect(a)
    assert cache.allocate(a, 0)
    cache.take_moves()
    cache.release(a, 0)
    assert cache.allocate(b, 0)
    cache.forget(a)
    assert cache.take_moves() == EncoderCacheMoves(freed=[key("a")])


def test_an_item_with_pixels_is_not_set_aside() -> None:
    cache = EncoderCacheManager(9)
    a, b = request("r", 9, [item("a", 0, 5, pixels=True)]), request("s", 9, [item("b", 0, 5)])
    cache.expect(a)
    assert cache.allocate(a, 0)
    cache.take_moves()
    cache.release(a, 0)
    assert cache.allocate(b, 0)
    assert cache.take_moves() == EncoderCacheMoves(freed=[key("a")])


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("impatient_threads")
def test_metrics_are_read_in_another_thread_while_items_come_and_go() -> None:
    cache = EncoderCacheManager(64)
    for number in range(32):
        assert cache.allocate(request(f"r{number}", 4, [item(f"resident-{number}", 0, 1)]), 0)
    passing = request("r", 4, [item("passing", 0, 4)])
    # One that lives and has no pixels: its item is set aside whenever it is evicted.
    waiting = request("s", 4, [item("waiting", 0, 32)])
    cache.expect(waiting)
    over = threading.Event()

    def schedule() -> None:
        while not over.is_set():
            if cache.is_aside(waiting.media[0]):
                cache.bring_back(waiting, 0)
            else:
                cache.allocate(waiting, 0)
            cache.take_moves()
            cache.release(waiting, 0)
            cache.allocate(passing, 0)
            cache.drop(key("passing"))

    scheduler = threading.Thread(target=schedule)
    scheduler.start()
    try:
        for _ in range(20000):
            assert 32 <= cache.num_referenced <= 64
            assert cache.num_aside in (0, 32)
    finally:
        over.set()
        scheduler.join()
