"""The scheduler as a pure object: no model, no clock, no thread."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from epd_engine.core.encoder_cache_manager import EncoderCacheManager, EncoderCacheMoves
from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import Chunk, ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason, Request, RequestError
from epd_engine.core.scheduler import Scheduler, SchedulerLimits
from epd_engine.ec_transfer.base import ECConnectorOutput
from tests.support.engine_objects import SetConnector, item, key, request


class Bench:
    """A scheduler with its ledgers, and a runner that does what it is told. `choose` gives a request's next
    token; `foreseen` is the next step where it is known already, as an engine would take it."""

    def __init__(
        self,
        *,
        stored: set[str] | None = None,
        blocks: int = 64,
        tokens: int = 16,
        seqs: int = 8,
        cache: int = 32,
        encoder_budget: int = 16,
        can_compute: bool = False,
    ):
        self.connector = None if stored is None else SetConnector(stored)
        self.cache = EncoderCacheManager(cache)
        self.pool = BlockPool(blocks, 4)
        planner = MediaPlanner(
            self.cache, self.connector, max_encoder_embeds=encoder_budget, can_compute=can_compute
        )
        self.scheduler = Scheduler(SchedulerLimits(seqs, tokens, 128), self.pool, planner)
        self.resident: set[str] = set()
        self.aside: set[str] = set()
        # What lies in each slot of the KV memory: the token there, and all that came before it.
        self.memory: dict[int, object] = {}
        self.choose: Callable[[Request], int] = lambda _: 7
        self.foreseen: SchedulerOutput | None = None

    def execute(self, step: SchedulerOutput, fail_loads: frozenset[str] = frozenset()) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        self.move(step.encoder_cache_moves)
        for r, i in step.scheduled_encoder_inputs:
            self.resident.add(r.media[i].mm_hash)
        for r, i in step.external_load_encoder_input:
            if r.media[i].mm_hash in fail_loads:
                output.ec_output.failed_recving[r.media[i].mm_hash] = "gone"
            else:
                self.resident.add(r.media[i].mm_hash)
        for chunk in step.chunks:
            needed = {chunk.request.media[i].mm_hash for i in chunk.request.media_in(chunk.start, chunk.end)}
            if missing := sorted(needed - self.resident):
                output.skipped[chunk.request.request_id] = missing
                continue
            self.compute(chunk)
            if chunk.samples:
                output.sampled[chunk.request.request_id] = self.choose(chunk.request)
        return output

    def move(self, moves: EncoderCacheMoves) -> None:
        self.resident -= set(moves.freed)
        self.aside -= set(moves.freed)
        for names, source, target in [
            (moves.set_aside, self.resident, self.aside),
            (moves.brought_back, self.aside, self.resident),
        ]:
            for name in names:
                source.remove(name)
                target.add(name)

    def compute(self, chunk: Chunk) -> None:
        """Attends to what lies before the chunk, and must find the request's own past there."""
        history = pasts(chunk.request, chunk.end)
        block_ids, size = chunk.request.block_ids, self.pool.block_size
        slots = [block_ids[n // size] * size + n % size for n in range(chunk.end)]
        for n in range(chunk.start):
            assert self.memory.get(slots[n]) == history[n], "another's KV was taken for one's own"
        for n in range(chunk.start, chunk.end):
            self.memory[slots[n]] = history[n]

    def step(self, **faults: frozenset[str]) -> tuple[SchedulerOutput, list[RequestUpdate]]:
        foreseen, self.foreseen = self.foreseen, None
        step = foreseen if foreseen and self.scheduler.confirm(foreseen) else self.scheduler.schedule()
        self.foreseen = self.scheduler.foresee(step)
        output = ModelRunnerOutput() if step.is_empty else self.execute(step, **faults)
        return step, self.scheduler.update(step, output)

    def run(self, limit: int = 1000) -> dict[str, RequestUpdate]:
        last = {}
        for _ in range(limit):
            if self.scheduler.num_running + self.scheduler.num_waiting == 0:
                return last
            for update in self.step()[1]:
                if update.is_last:
                    last[update.request_id] = update
        raise AssertionError("the scheduler does not come to an end")

    def assert_at_rest(self) -> None:
        assert self.pool.num_free == self.pool.num_blocks
        assert self.cache.num_referenced == 0
        assert self.scheduler.problems() == []
        self.move(self.cache.take_moves())  # as the next step would
        assert self.aside == set()


def pasts(of: Request, end: int) -> list[int]:
    """For each token a number that stands for it and for everything before it, media included."""
    chain, found = hash(of.cache_salt), []
    for n, token in enumerate(of.tokens(0, end)):
        media = [(of.media[i].mm_hash, n - of.media[i].offset) for i in of.media_in(n, n + 1)]
        chain = hash((chain, token, tuple(media)))
        found.append(chain)
    return found


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    bench = Bench(tokens=5)
    bench.scheduler.add(request("r", 12, max_tokens=3))
    lengths = []
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        step, _ = bench.step()
        lengths += [c.length for c in step.chunks]
    assert lengths == [5, 5, 2, 1, 1]
    bench.assert_at_rest()


def test_an_item_in_the_store_is_loaded_and_takes_no_compute_budget() -> None:
    bench = Bench(stored={key("a"), key("b")}, encoder_budget=1)
    bench.scheduler.add(request("r", 12, [item("a", 0, 4), item("b", 4, 4)]))
    step, _ = bench.step()
    assert [i for _, i in step.external_load_encoder_input] == [0, 1]
    assert step.scheduled_encoder_inputs == []
    assert step.chunks[0].length == 12
    assert bench.run()["r"].finish_reason is FinishReason.LENGTH
    bench.assert_at_rest()


def test_a_resident_item_is_neither_loaded_nor_computed() -> None:
    bench = Bench(stored={key("a")})
    for name in ("r", "s"):
        bench.scheduler.add(request(name, 12, [item("a", 0, 4)]))
        bench.run()
    assert bench.connector is not None
    assert bench.connector.loads == [key("a")]


def test_an_item_that_is_nowhere_is_computed_where_there_is_a_tower() -> None:
    bench = Bench(stored=set(), can_compute=True)
    bench.scheduler.add(request("r", 12, [item("a", 2, 4, pixels=True)]))
    step, _ = bench.step()
    assert len(step.scheduled_encoder_inputs) == 1
    assert bench.run()["r"].error is None


@pytest.mark.parametrize(("pixels", "can_compute"), [(False, True), (True, False), (False, False)])
def test_an_item_that_is_nowhere_and_cannot_be_computed_is_a_retryable_miss(
    pixels: bool, can_compute: bool
) -> None:
    bench = Bench(stored=set(), can_compute=can_compute)
    bench.scheduler.add(request("r", 12, [item("a", 2, 4, pixels=pixels)]))
    error = bench.run()["r"].error
    assert error is not None
    assert (error.status, error.code) == (503, "ec_miss")
    bench.assert_at_rest()


def test_a_claim_that_differs_from_what_is_resident_is_a_miss_and_leaves_the_other_alone() -> None:
    bench = Bench(stored={key("a")})
    bench.scheduler.add(request("r", 12, [item("a", 0, 4)], max_tokens=20))
    bench.step()
    bench.scheduler.add(request("s", 12, [item("a", 0, 6)]))
    ends = bench.run()
    assert ends["s"].error is not None
    assert ends["s"].error.code == "ec_miss"
    assert ends["r"].finish_reason is FinishReason.LENGTH


def test_the_store_is_asked_once_per_item() -> None:
    """vllm#32585: not at every step while the request waits."""
    bench = Bench(stored={key("a"), key("b")}, cache=4)
    bench.scheduler.add(request("r", 40, [item("a", 0, 4)], max_tokens=1))
    bench.scheduler.add(request("s", 40, [item("b", 0, 4)], max_tokens=1))
    bench.run()
    assert bench.connector is not None
    assert bench.connector.probes == 2


def test_the_text_before_an_item_without_room_is_computed_first() -> None:
    bench = Bench(stored={key("a"), key("b")}, cache=4, tokens=64)
    bench.scheduler.add(request("r", 12, [item("a", 0, 4), item("b", 8, 4)]))
    step, _ = bench.step()
    assert [(c.start, c.length) for c in step.chunks] == [(0, 8)]
    step, _ = bench.step()
    assert [(c.start, c.length) for c in step.chunks] == [(8, 4)]


def test_an_item_larger_than_the_encoder_budget_gets_a_step_of_its_own() -> None:
    bench = Bench(encoder_budget=6, can_compute=True, tokens=64)
    bench.scheduler.add(request("r", 30, [item("a", 0, 4, pixels=True), item("b", 4, 20, pixels=True)]))
    encoded = []
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        step, _ = bench.step()
        encoded.append([i for _, i in step.scheduled_encoder_inputs])
    assert encoded[:2] == [[0], [1]]


def test_an_item_that_can_never_fit_is_refused_at_once_with_the_limits_name() -> None:
    bench = Bench(stored=set(), cache=8)
    with pytest.raises(RequestError, match="--encoder-cache-size 8"):
        bench.scheduler.add(request("r", 12, [item("a", 0, 9)]))
    assert bench.scheduler.num_waiting == 0


def test_a_failed_load_is_computed_where_pixels_are_at_hand() -> None:
    bench = Bench(stored={key("a")}, can_compute=True)
    bench.scheduler.add(request("r", 12, [item("a", 0, 4, pixels=True)]))
    step, updates = bench.step(fail_loads=frozenset({key("a")}))
    assert updates == []
    step, _ = bench.step()
    assert len(step.scheduled_encoder_inputs) == 1
    assert bench.run()["r"].error is None
    bench.assert_at_rest()


def test_a_failed_load_without_pixels_fails_that_request_alone() -> None:
    bench = Bench(stored={key("a")})
    bench.scheduler.add(request("r", 12, [item("a", 0, 4)]))
    bench.scheduler.add(request("s", 4))
    bench.step(fail_loads=frozenset({key("a")}))
    ends = bench.run()
    assert ends["r"].error is not None
    assert ends["r"].error.code == "ec_miss"
    assert ends["s"].finish_reason is FinishReason.LENGTH
    bench.assert_at_rest()


def test_an_item_that_failed_to_encode_fails_its_request() -> None:
    bench = Bench(can_compute=True)
    bench.scheduler.add(request("r", 12, [item("a", 0, 4, pixels=True)]))
    step = bench.scheduler.schedule()
    output = ModelRunnerOutput(
        skipped={"r": [key("a")]}, encode_errors={key("a"): "NaN"}, ec_output=ECConnectorOutput()
    )
    (update,) = bench.scheduler.update(step, output)
    assert update.error is not None
    assert update.error.code == "encoder_failed"
    bench.assert_at_rest()


def test_an_output_that_is_lost_fails_who_needs_it_and_is_made_anew_for_the_next() -> None:
    """As after a step that failed while tensors were moved: nobody waits for what never comes."""
    bench = Bench(can_compute=True)
    bench.scheduler.add(request("before", 12, [item("a", 0, 4, pixels=True)]))
    assert bench.run()["before"].error is None
    bench.resident.clear()
    bench.scheduler.add(request("r", 13, [item("a", 1, 4, pixels=True)]))
    error = bench.run()["r"].error
    assert error is not None
    assert (error.status, error.code) == (500, "encoder_failed")
    bench.scheduler.add(request("again", 13, [item("a", 1, 4, pixels=True)]))
    assert bench.run()["again"].error is None
    bench.assert_at_rest()


def test_a_step_that_raised_ends_its_own_requests_and_no_others() -> None:
    bench = Bench(seqs=1, can_compute=True)
    bench.scheduler.add(request("r", 8, [item("a", 0, 4, pixels=True)]))
    bench.scheduler.add(request("s", 4))
    step = bench.scheduler.schedule()
    (update,) = bench.scheduler.fail_step(step, RequestError(500, "internal_error", "boom"))
    assert update.request_id == "r"
    assert set(bench.run()) == {"s"}
    bench.assert_at_rest()
    assert bench.cache.num_used == 0  # the tensor may never have been made


def test_without_blocks_the_last_request_is_preempted_and_still_answers() -> None:
    bench = Bench(blocks=6, tokens=64)
    made = [request(name, 10, max_tokens=6) for name in ("r", "s")]
    for one in made:
        bench.scheduler.add(one)
    preempted = False
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        before = bench.scheduler.num_running
        bench.step()
        preempted |= bench.scheduler.num_running < before and bench.scheduler.num_waiting > 0
    assert preempted
    assert [one.num_cached_tokens for one in made] == [0, 0], "what it finds afterwards is its own"
    bench.assert_at_rest()


def test_a_preempted_request_needs_nothing_of_a_store_that_has_let_go_of_its_item() -> None:
    """What a client has begun to read must not end in a miss because of what others do."""
    bench = Bench(stored={key("a"), key("b")}, blocks=8, cache=4)
    assert bench.connector is not None
    bench.scheduler.add(request("first", 8, [item("a", 0, 4)], max_tokens=20))
    bench.scheduler.add(request("second", 8, [item("b", 0, 4)], max_tokens=20))
    while bench.cache.num_aside == 0:  # there is room for one
        bench.step()
    bench.connector.stored.clear()
    before = bench.connector.probes
    ends = bench.run()
    assert {name: end.finish_reason for name, end in ends.items()} == dict.fromkeys(
        ("first", "second"), FinishReason.LENGTH
    )
    assert bench.connector.probes == before
    bench.assert_at_rest()


def test_a_request_that_could_not_have_its_media_again_is_not_the_one_preempted() -> None:
    """Its KV is another's of the same beginning, and the item itself never came here."""
    bench = Bench(stored={key("a")}, blocks=11, cache=8)
    assert bench.connector is not None
    bench.scheduler.add(request("r", 13, [item("a", 0, 4)], max_tokens=1))
    bench.run()
    bench.cache.allocate(request("evicts", 8, [item("b", 0, 8)]), 0)
    bench.cache.drop(key("b"))
    bench.connector.stored.clear()
    bench.scheduler.add(request("text", 13, max_tokens=12))
    bench.scheduler.add(request("known", 13, [item("a", 0, 4)], max_tokens=12))
    assert {name: end.error for name, end in bench.run().items()} == {"text": None, "known": None}
    bench.assert_at_rest()


def test_what_was_planned_for_a_request_that_failed_in_planning_is_done_for_the_next() -> None:
    bench = Bench(stored={key("a")})
    bench.scheduler.add(request("fails", 12, [item("a", 0, 4), item("b", 4, 4)]))
    _, updates = bench.step()
    assert updates[0].error is not None
    bench.scheduler.add(request("r", 12, [item("a", 0, 4)]))
    assert bench.run()["r"].finish_reason is FinishReason.LENGTH
    bench.assert_at_rest()


def test_a_prompt_that_begins_like_another_is_not_computed_again() -> None:
    bench = Bench(tokens=64)
    bench.scheduler.add(request("r", 18))
    bench.run()
    bench.scheduler.add(request("s", 18))
    step, _ = bench.step()
    assert [(c.start, c.length) for c in step.chunks] == [(16, 2)]
    assert step.cached_prompt_tokens == 16


def test_a_prompt_that_is_known_whole_is_computed_from_its_last_block_on() -> None:
    bench = Bench(tokens=64)
    for name in ("r", "s"):
        bench.scheduler.add(request(name, 16, max_tokens=1))
        step, _ = bench.step()
    assert [(c.start, c.length) for c in step.chunks] == [(12, 4)], "its last token gives the first answer"


def test_media_in_a_known_beginning_are_not_asked_for() -> None:
    bench = Bench(stored={key("a")}, tokens=64)
    for name in ("r", "s"):
        bench.scheduler.add(request(name, 18, [item("a", 2, 6)], max_tokens=1))
        bench.cache.drop(key("a"))
        step, _ = bench.step()
    assert step.external_load_encoder_input == []
    assert step.chunks[0].start == 16
    assert bench.connector is not None
    assert bench.connector.probes == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(request("s", 18, [item("b", 2, 6)]), id="another picture"),
        pytest.param(request("s", 18, [item("a", 1, 6)]), id="the same elsewhere"),
        pytest.param(request("s", 18), id="none"),
        pytest.param(request("s", 18, [item("a", 2, 6, grid=[1, 6, 4])]), id="another claim of its grid"),
        pytest.param(request("s", 18, [item("a", 2, 5)]), id="another claim of its size"),
    ],
)
def test_the_same_tokens_over_other_media_are_another_prompt(other: Request) -> None:
    bench = Bench(stored={key("a"), key("b")}, tokens=64)
    bench.scheduler.add(request("r", 18, [item("a", 2, 6)]))
    bench.run()
    bench.cache.drop(key("a"))
    bench.scheduler.add(other)
    step, _ = bench.step()
    assert step.chunks[0].start == 0


def test_tenants_do_not_share_a_beginning() -> None:
    bench = Bench(tokens=64)
    for salt in ("one", "other"):
        made = request(salt, 18)
        made.cache_salt = salt
        bench.scheduler.add(made)
        step, _ = bench.step()
    assert step.cached_prompt_tokens == 0


def test_a_lower_priority_value_is_served_first_and_preempted_last() -> None:
    bench = Bench(seqs=1, tokens=64)
    for name, priority in (("late", 0), ("first", 0), ("urgent", -1)):
        made = request(name, 4, max_tokens=2)
        made.priority = priority
        bench.scheduler.add(made)
    order = [step.chunks[0].request.request_id for step, _ in (bench.step() for _ in range(6))]
    assert order == ["urgent", "urgent", "late", "late", "first", "first"]
    bench = Bench(blocks=6, tokens=64)
    for name, priority in (("low", 1), ("high", 0)):
        made = request(name, 10, max_tokens=6)
        made.priority = priority
        made.cache_salt = name
        bench.scheduler.add(made)
    ends = []
    while bench.scheduler.num_running + bench.scheduler.num_waiting:
        ends += [u.request_id for u in bench.step()[1] if u.is_last]
    assert ends == ["high", "low"]


@pytest.mark.parametrize(("seed", "steps"), [*((seed, 300) for seed in range(8)), (8, 10_000)])
def test_random_traffic_keeps_every_budget_and_comes_to_rest(seed: int, steps: int) -> None:
    """Requests, repeated items and beginnings, failed loads and aborts at any state: nothing leaks, nothing
    starves, nobody attends to another's past."""
    rng = random.Random(seed)
    names = "abcdefgh"
    sizes = {n: rng.choice([1, 3, 6, 12]) for n in names}
    stored = {key(n) for n in names[:4]}
    bench = Bench(stored=stored, cache=16, encoder_budget=8, blocks=40, can_compute=True)
    alive: dict[str, Request] = {}
    ended: set[str] = set()
    took_over: set[str] = set()  # KV of others, perhaps of media that never came here
    for number in range(steps):
        if rng.random() < 0.4:
            made = random_request(rng, f"r{number}", names, sizes)
            alive[made.request_id] = made
            bench.scheduler.add(made)
        if alive and rng.random() < 0.1:
            victim = rng.choice(sorted(alive))
            bench.scheduler.abort(victim)
            ended.add(victim)
        for name in names[:4]:
            (stored.add if rng.random() < 0.7 else stored.discard)(key(name))
        failing = frozenset(key(n) for n in names if rng.random() < 0.05)
        step, updates = bench.step(fail_loads=failing)
        assert sum(c.length for c in step.chunks) <= 16
        assert len({c.request.request_id for c in step.chunks}) == len(step.chunks)
        assert bench.scheduler.num_running <= 8
        assert bench.cache.num_used <= 16
        if len(step.scheduled_encoder_inputs) > 1:
            assert sum(r.media[i].num_embeds for r, i in step.scheduled_encoder_inputs) <= 8
        ended |= {u.request_id for u in updates if u.is_last}
        for update in updates:
            begun = alive.get(update.request_id)
            if update.error is not None and begun is not None and begun.output_token_ids:
                assert begun.request_id in took_over, "a miss after the answer had begun"
        took_over |= {c.request.request_id for c in step.chunks if c.request.num_cached_tokens}
        for name in ended & set(alive):
            del alive[name]
    ended |= set(bench.run())
    assert ended >= set(alive)
    bench.assert_at_rest()


def random_request(rng: random.Random, name: str, names: str, sizes: dict[str, int]) -> Request:
    media, offset = [], 0
    for _ in range(rng.randint(0, 3)):
        offset += rng.randint(0, 5)
        chosen = rng.choice(names)
        media.append(item(chosen, offset, sizes[chosen], pixels=rng.random() < 0.5))
        offset += sizes[chosen]
    made = request(name, offset + rng.randint(1, 20), media, max_tokens=rng.randint(1, 6))
    made.priority = rng.choice([0, 0, 0, 1, -1])
    made.cache_salt = rng.choice(["", "", "tenant"])
    return made


@pytest.mark.parametrize("where", ["stored", "pixels"])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_overtaken_for_long_by_those_who_keep_coming(seed: int, where: str) -> None:
    """More arrive than can be served, at every step, with small items or none. Among them are a few that need
    nearly all of the encoder cache or of the KV at once; they begin before those who came after them end."""
    rng = random.Random(seed)
    stored = {key("small"), key("large")} if where == "stored" else set()
    bench = Bench(stored=stored, cache=16, encoder_budget=8, blocks=40, can_compute=True)
    arrived: dict[str, int] = {}
    ended: list[str] = []
    for number in range(600):
        demanding = number % 50 == 10
        media = [item("large", 2, 15)] if demanding else [item("small", 0, 3)] if rng.random() < 0.5 else []
        media = [replace(one, features={}) for one in media] if where == "pixels" else media
        made = request(f"r{number}", 110 if demanding else rng.randint(4, 30), media, max_tokens=4)
        made.cache_salt = made.request_id  # so that all of them are computed
        arrived[made.request_id] = number
        bench.scheduler.add(made)
        ended += [update.request_id for update in bench.step()[1] if update.is_last]
    places = [arrived[name] for name in ended]
    assert len(places) > 50
    assert any(place % 50 == 10 for place in places)
    for at, place in enumerate(places):
        before = set(range(place)) - set(places[:at])
        assert len(before) <= 8, f"{place} ended before {sorted(before)}"
