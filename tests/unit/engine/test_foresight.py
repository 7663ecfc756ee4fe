"""A step that is planned while the one before it runs: the same as one planned in its turn, or none."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from epd_engine.core.output import RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason, Request, RequestError
from tests.support.engine_objects import item, key, request
from tests.unit.engine.test_scheduler import Bench, random_request


def decoding(*names: str, max_tokens: int = 20, **limits: int) -> Bench:
    """Requests that have got their first tokens."""
    bench = Bench(tokens=64, **limits)
    for name in names:
        bench.scheduler.add(request(name, 9, max_tokens=max_tokens))
    bench.step()
    return bench


def planned(step: SchedulerOutput) -> list[tuple[str, int, int, list[int]]]:
    return [(c.request.request_id, c.start, c.length, c.request.block_ids) for c in step.chunks]


def test_every_step_that_only_adds_tokens_is_foreseen() -> None:
    bench = decoding("r", "s", max_tokens=6)
    for n in range(5):
        foreseen = bench.foreseen
        step, updates = bench.step()
        assert step is foreseen
        assert [(c.start, c.length) for c in step.chunks] == [(9 + n, 1)] * 2
    assert [u.finish_reason for u in updates] == [FinishReason.LENGTH] * 2
    assert bench.foreseen is None
    bench.assert_at_rest()


def test_who_reaches_its_length_is_not_foreseen_but_the_others_are() -> None:
    bench = decoding("long")
    bench.scheduler.add(request("short", 9, max_tokens=2))
    bench.step()
    assert [name for name, *_ in planned(bench.step()[0])] == ["long", "short"]
    foreseen = bench.foreseen
    assert [name for name, *_ in planned(bench.step()[0])] == ["long"]
    assert foreseen is not None
    bench.run()
    bench.assert_at_rest()


def test_the_length_of_the_model_is_a_length_too() -> None:
    bench = Bench(tokens=200)
    bench.scheduler.add(request("r", 126, max_tokens=50))
    steps = [bench.step()[0] for _ in range(2)]
    assert [c.end for step in steps for c in step.chunks] == [126, 127]
    assert bench.foreseen is None
    bench.assert_at_rest()


def test_who_waits_without_a_seat_does_not_matter() -> None:
    bench = decoding("r", "s", seqs=2)
    bench.scheduler.add(request("waits", 9))
    foreseen = bench.foreseen
    assert bench.step()[0] is foreseen
    assert bench.foreseen is not None


def arrive(bench: Bench) -> None:
    bench.scheduler.add(request("late", 9))


def abort(bench: Bench) -> None:
    bench.scheduler.abort("r")


def fail(bench: Bench) -> None:
    assert bench.foreseen is not None
    bench.scheduler.fail_step(bench.foreseen, RequestError(500, "internal_error", "boom"))


def end_by_its_token(bench: Bench) -> None:
    bench.choose = lambda of: -1 if of.request_id == "r" else 7
    bench.step()


@pytest.mark.parametrize("change", [arrive, abort, fail, end_by_its_token])
def test_what_has_not_come_true_is_dropped(change: Callable[[Bench], None]) -> None:
    bench = decoding("r", "s")
    change(bench)
    foreseen = bench.foreseen
    assert foreseen is not None
    assert not bench.scheduler.is_still_right(foreseen)
    assert bench.step()[0] is not foreseen
    bench.run()
    bench.assert_at_rest()


def test_a_step_whose_tokens_have_not_come_is_not_followed() -> None:
    """As when it was skipped, or never run."""
    bench = decoding("r", "s")
    step = bench.scheduler.schedule()
    foreseen = bench.scheduler.foresee(step)
    assert foreseen is not None
    assert not bench.scheduler.is_still_right(foreseen)


def test_another_request_in_ones_place_is_another_step() -> None:
    bench = decoding("r")
    foreseen = bench.foreseen
    bench.scheduler.abort("r")
    bench.scheduler.add(request("s", 9))
    bench.step()
    assert foreseen is not None
    assert not bench.scheduler.is_still_right(foreseen)


def test_nothing_is_foreseen_while_one_of_those_who_run_waits_for_room_for_its_picture() -> None:
    bench = Bench(stored={key("a"), key("b")}, cache=4)
    bench.scheduler.add(request("r", 15, [item("a", 11, 4)], max_tokens=2))
    bench.scheduler.add(request("s", 5, [item("b", 1, 4)]))
    bench.step()  # all of r's prompt, and the first token of s's
    bench.cache.reference_if_cached(request("holds", 4, [item("a", 0, 4)]), 0)
    assert [name for name, *_ in planned(bench.step()[0])] == ["r"]
    assert bench.foreseen is None
    assert bench.scheduler.num_running == 1


def test_nothing_is_foreseen_while_a_prompt_is_not_computed() -> None:
    bench = Bench(tokens=16)
    bench.scheduler.add(request("r", 9, max_tokens=20))
    bench.step()
    bench.scheduler.add(request("s", 40))
    for _ in range(2):
        bench.step()
        assert bench.foreseen is None


def test_nothing_is_foreseen_beside_media_that_may_fail_to_arrive() -> None:
    bench = Bench(stored={key("a")})
    bench.scheduler.add(request("r", 12, [item("a", 0, 4)]))
    bench.step()
    assert bench.foreseen is None
    bench.step()
    assert bench.foreseen is not None


def test_nothing_is_foreseen_without_blocks_for_all() -> None:
    bench = decoding("r", "s", max_tokens=12, blocks=6)
    while bench.foreseen is not None:
        bench.step()
    assert bench.pool.num_free == 0
    bench.run()
    bench.assert_at_rest()


def test_what_an_ended_request_leaves_to_do_is_done_in_the_foreseen_step() -> None:
    """Here an item that was set aside for it alone, and is freed."""
    bench = Bench(stored={key("a"), key("b")}, cache=4, tokens=64)
    bench.scheduler.add(request("r", 9, max_tokens=20))
    bench.scheduler.add(request("s", 9, [item("a", 0, 4)], max_tokens=4))
    bench.step()
    bench.cache.allocate(request("other", 9, [item("b", 0, 4)]), 0)
    bench.cache.drop(key("b"))
    while bench.cache.num_aside:
        bench.step()
    foreseen = bench.foreseen
    step, _ = bench.step()
    assert step is foreseen
    assert key("a") in step.encoder_cache_moves.freed


def ended_by(of: Request) -> FinishReason:
    return FinishReason.STOP if of.output_token_ids[-1] == -1 else FinishReason.LENGTH


def chosen(of: Request) -> int:
    """A token that depends on the request and its place alone; some end the answer."""
    drawn = random.Random(f"{of.request_id} {len(of.output_token_ids)}").randrange(20)
    return drawn or -1


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_is_planned_as_it_would_be_without_foresight(seed: int) -> None:
    """Arrivals, aborts at any state, ends of both kinds, lack of blocks and of seats, media."""
    rng = random.Random(seed)
    names = "abcdefgh"
    sizes = {n: rng.choice([1, 3, 6, 12]) for n in names}
    bench = Bench(
        stored={key(n) for n in names[:4]}, cache=16, encoder_budget=8, blocks=24, seqs=4, can_compute=True
    )
    bench.choose = chosen
    made: dict[str, Request] = {}
    told: dict[str, list[int]] = {}
    used = dropped = 0

    def step(**faults: frozenset[str]) -> list[RequestUpdate]:
        nonlocal used, dropped
        foreseen, twin = bench.foreseen, None
        if foreseen is not None and bench.scheduler.is_still_right(foreseen):
            twin = copy.deepcopy(bench.scheduler).schedule()
            assert planned(foreseen) == planned(twin)
        run, updates = bench.step(**faults)
        if twin is None:
            assert run is not foreseen
            dropped += foreseen is not None
        else:
            used += 1
            assert run is foreseen
            assert run.encoder_cache_moves == twin.encoder_cache_moves
        for update in updates:
            told.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.finish_reason is not None:
                assert update.finish_reason is ended_by(made[update.request_id])
        return updates

    alive: set[str] = set()
    for number in range(300):
        if rng.random() < 0.15:
            one = random_request(rng, f"r{number}", names, sizes)
            one.sampling = replace(one.sampling, max_tokens=rng.randint(1, 20))
            made[one.request_id] = one
            alive.add(one.request_id)
            bench.scheduler.add(one)
        if alive and rng.random() < 0.03:
            bench.scheduler.abort(rng.choice(sorted(alive)))
        failing = frozenset(key(n) for n in names if rng.random() < 0.05)
        alive -= {update.request_id for update in step(fail_loads=failing) if update.is_last}
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        step()
    assert used > 20
    assert dropped > 5
    for name, tokens in told.items():
        outputs = made[name].output_token_ids
        assert tokens == outputs
        assert outputs == tokens_of(name, len(outputs))
    bench.assert_at_rest()


def tokens_of(name: str, count: int) -> list[int]:
    of = request(name, 1)
    for _ in range(count):
        of.output_token_ids.append(chosen(of))
    return of.output_token_ids
