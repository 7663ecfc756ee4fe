import pytest

from epd_engine.core.encode_scheduler import EncodeScheduler
from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import ModelRunnerOutput
from epd_engine.core.request import FinishReason, RequestError
from epd_engine.ec_transfer.base import ECConnectorOutput
from tests.support.engine_objects import SetConnector, item, key, request


def make(stored: set[str], cache: int = 16, budget: int = 8) -> tuple[EncodeScheduler, SetConnector]:
    connector = SetConnector(stored, role="ec_producer")
    manager = EncoderCacheManager(cache)
    planner = MediaPlanner(manager, connector, max_encoder_embeds=budget, can_compute=True)
    return EncodeScheduler(planner), connector


def sent(*names: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(ec_output=ECConnectorOutput(finished_sending={key(n) for n in names}))


def test_done_means_published() -> None:
    """vllm#50275: the request must not end before its item can be read."""
    scheduler, _ = make(set())
    scheduler.add(request("r", 0, [item("a", 0, 4, pixels=True)]))
    step = scheduler.schedule()
    assert len(step.scheduled_encoder_inputs) == 1
    assert scheduler.update(step, ModelRunnerOutput()) == []  # encoded, not yet published
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == step.republish_encoder_input == []
    (update,) = scheduler.update(step, sent("a"))
    assert update.finish_reason is FinishReason.STOP


def test_encoding_goes_on_while_the_disk_is_busy() -> None:
    scheduler, connector = make(set(), cache=16, budget=4)
    for name in "ab":
        scheduler.add(request(name, 0, [item(name, 0, 4, pixels=True)]))
    first = scheduler.schedule()
    assert not first.wait_for_saves
    assert scheduler.update(first, ModelRunnerOutput()) == []
    second = scheduler.schedule()
    assert [r.request_id for r, _ in second.scheduled_encoder_inputs] == ["b"]
    assert not second.wait_for_saves
    (update,) = scheduler.update(second, sent("a"))
    assert update.request_id == "a"
    third = scheduler.schedule()
    assert third.wait_for_saves, "there is nothing to encode, so that the wait costs nobody"
    (update,) = scheduler.update(third, sent("b"))
    assert update.request_id == "b"
    assert connector.saves == [key("a"), key("b")]


def test_an_item_that_is_stored_already_is_success() -> None:
    scheduler, connector = make({key("a")})
    scheduler.add(request("r", 0, [item("a", 0, 4, pixels=True)]))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == []
    (update,) = scheduler.update(step, ModelRunnerOutput())
    assert update.finish_reason is FinishReason.STOP
    assert connector.saves == []


def test_an_item_that_is_resident_but_no_longer_stored_is_published_again() -> None:
    """The store was cleaned while the encoder lived: memory proves nothing about the volume."""
    scheduler, connector = make(set())
    for name in ("r", "s"):
        scheduler.add(request(name, 0, [item("a", 0, 4, pixels=True)]))
        step = scheduler.schedule()
        scheduler.update(step, sent("a"))
    assert connector.saves == [key("a"), key("a")]
    assert step.scheduled_encoder_inputs == []


def test_the_answer_names_each_item_with_its_positions_and_metadata() -> None:
    scheduler, _ = make(set())
    media = [item(n, 0, 2, pixels=True) for n in ("a", "b", "a")]
    scheduler.add(request("r", 0, media))
    (update,) = scheduler.update(scheduler.schedule(), sent("a", "b"))
    assert update.ec_transfer_params == {
        key("a"): {"item_indices": [0, 2], "metadata": {"image_grid_thw": [1, 2, 2]}},
        key("b"): {"item_indices": [1], "metadata": {"image_grid_thw": [1, 2, 2]}},
    }


def test_items_beyond_the_budget_come_in_later_steps() -> None:
    scheduler, _ = make(set(), cache=16, budget=8)
    scheduler.add(request("r", 0, [item(n, 0, 4, pixels=True) for n in "abc"]))
    step = scheduler.schedule()
    assert len(step.scheduled_encoder_inputs) == 2
    assert scheduler.update(step, sent("a", "b")) == []
    step = scheduler.schedule()
    (update,) = scheduler.update(step, sent("c"))
    assert update.is_last


@pytest.mark.parametrize(
    ("output", "code", "status"),
    [
        (
            ModelRunnerOutput(ec_output=ECConnectorOutput(failed_sending={key("a"): "disk full"})),
            "ec_store_unavailable",
            503,
        ),
        (ModelRunnerOutput(encode_errors={key("a"): "NaN"}), "encoder_failed", 500),
    ],
)
def test_what_cannot_be_published_fails_its_request_with_the_reason(
    output: ModelRunnerOutput, code: str, status: int
) -> None:
    scheduler, _ = make(set())
    scheduler.add(request("r", 0, [item("a", 0, 4, pixels=True)]))
    (update,) = scheduler.update(scheduler.schedule(), output)
    assert isinstance(update.error, RequestError)
    assert (update.error.code, update.error.status) == (code, status)
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_an_abort_frees_what_the_request_holds() -> None:
    scheduler, _ = make(set(), cache=4)
    scheduler.add(request("r", 0, [item("a", 0, 4, pixels=True)]))
    step = scheduler.schedule()
    scheduler.abort("r")
    assert scheduler.update(step, sent("a")) == []
    scheduler.add(request("s", 0, [item("b", 0, 4, pixels=True)]))
    assert len(scheduler.schedule().scheduled_encoder_inputs) == 1


def test_the_urgent_overtake_who_waits_but_not_who_has_begun() -> None:
    scheduler, _ = make(set(), budget=4)
    for name, priority in (("begun", 0), ("patient", 1), ("first", 0), ("second", 0), ("urgent", -1)):
        made = request(name, 0, [item(f"{name}{n}", 4 * n, 4, pixels=True) for n in range(2)])
        made.priority = priority
        scheduler.add(made)
        if name == "begun":
            step = scheduler.schedule()
            scheduler.update(step, ModelRunnerOutput())
    order = []
    while scheduler.num_running + scheduler.num_waiting:
        step = scheduler.schedule()
        output = ModelRunnerOutput()
        for asked, index in step.scheduled_encoder_inputs:
            order.append(asked.request_id)
            output.ec_output.finished_sending.add(asked.media[index].mm_hash)
        output.ec_output.finished_sending.add(key("begun0"))
        scheduler.update(step, output)
    assert order == ["begun", "urgent", "urgent", "first", "first", "second", "second", "patient", "patient"]
