"""Steps prepared beside the ones before them: a real model says the same as when each has its turn."""

from collections.abc import Callable
from typing import Any

import pytest

from epd_engine.core.output import Chunk, RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason
from epd_engine.core.scheduler import Scheduler
from epd_engine.worker.model_runner import ModelRunner
from tests.support.digits import MODEL, shipped, user
from tests.support.in_process import InProcess

pytestmark = pytest.mark.usefixtures("one_thread")

ALONE = {"max_model_len": 512, "kv_cache_tokens": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 128}
SEVEN, THREE = shipped("seven"), shipped("three")
BODIES: list[dict[str, Any]] = [
    {"messages": [user("Hello, who are you?")], "temperature": 0, "max_tokens": 40},
    {"messages": [user(SEVEN, "What digit is this?")], "temperature": 0, "max_tokens": 40},
    {"messages": [user(SEVEN, THREE, "What digits are these?")], "seed": 1, "max_tokens": 30},
    {"messages": [user("Count.")], "temperature": 2, "seed": 2, "max_tokens": 25, "ignore_eos": True},
    {
        "messages": [user(THREE, "And this?")],
        "temperature": 1.5,
        "seed": 3,
        "top_p": 0.9,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.2,
        "max_tokens": 35,
        "ignore_eos": True,
    },
    {"messages": [user("Go on. " * 30)], "temperature": 0, "max_tokens": 60, "ignore_eos": True},
    {"messages": [user("x")], "temperature": 1, "seed": 4, "max_tokens": 50, "min_tokens": 12},
    {"messages": [user("Once more.")], "temperature": 0, "max_tokens": 30, "logprobs": True},
]
ARRIVALS = {0: [0, 1], 3: [2], 11: [3, 4], 12: [5], 25: [6, 7]}  # by step
ABORTS = {30: 5, 31: 7}

Told = list[list[RequestUpdate]]


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each foreseen step, whether it was run."""
    answers: list[bool] = []
    confirm = Scheduler.confirm

    def watched(self: Scheduler, foreseen: SchedulerOutput) -> bool:
        answers.append(confirm(self, foreseen))
        return answers[-1]

    monkeypatch.setattr(Scheduler, "confirm", watched)
    return answers


def run_all() -> Told:
    """The news of every step."""
    instance = InProcess(MODEL, **ALONE)
    try:
        requests, engine, told = instance.build(BODIES), instance.engine, []
        while engine.has_work or len(told) <= max(ARRIVALS):
            for index in ARRIVALS.get(len(told), []):
                engine.add(requests[index])
            if len(told) in ABORTS:
                engine.abort(requests[ABORTS[len(told)]].request_id)
            told.append(engine.step())
        assert engine.scheduler.problems() == []
        return told
    finally:
        instance.close()


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Told:
    with monkeypatch.context() as patched:
        patched.setattr(Scheduler, "foresee", lambda self, step: None)
        return run_all()


def test_the_same_is_said_step_by_step_as_without(in_turn: Told, confirmed: list[bool]) -> None:
    assert run_all() == in_turn
    assert confirmed.count(True) > 20
    assert False in confirmed
    ends = {update.finish_reason for updates in in_turn for update in updates}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= ends


def test_the_next_step_is_prepared_before_the_tokens_of_this_one_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a device computes by itself, it does so meanwhile."""
    done: list[str] = []
    for owner, name in ((Scheduler, "foresee"), (ModelRunner, "_sample")):
        works: Callable[..., Any] = getattr(owner, name)

        def noted(*given: Any, works: Callable[..., Any] = works, name: str = name) -> Any:
            done.append(name)
            return works(*given)

        monkeypatch.setattr(owner, name, noted)
    run_all()
    assert done == ["foresee", "_sample"] * (len(done) // 2)
    assert done


def is_not_known_yet(chunks: list[Chunk]) -> bool:
    return chunks[0].end > chunks[0].request.num_tokens


@pytest.mark.parametrize(
    ("owner", "name", "is_ahead"),
    [(Scheduler, "foresee", lambda _: True), (ModelRunner, "pack", is_not_known_yet)],
)
def test_a_defect_in_looking_ahead_costs_nobody_an_answer(
    in_turn: Told,
    confirmed: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    is_ahead: Callable[[Any], bool],
) -> None:
    def fails_ahead(self: Any, given: Any) -> Any:
        if is_ahead(given):
            raise RuntimeError("injected")
        return works(self, given)

    works: Callable[[Any, Any], Any] = getattr(owner, name)
    monkeypatch.setattr(owner, name, fails_ahead)
    assert run_all() == in_turn
    assert confirmed == []
    assert "injected" in caplog.text


def test_a_step_that_fails_takes_what_was_foreseen_with_it(
    confirmed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask afterwards are answered."""
    instance = InProcess(MODEL, **ALONE)
    first, second = instance.build(BODIES[:2])
    instance.engine.add(first)
    for _ in range(3):
        instance.engine.step()
    confirmed.clear()
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "_sample", lambda *_: 1 / 0)
        (update,) = instance.engine.step()
    assert update.error is not None
    assert confirmed == [True]
    assert instance.run([second])[0].ids
    assert confirmed[1] is False
    instance.close()
