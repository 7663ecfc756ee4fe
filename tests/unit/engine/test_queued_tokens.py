"""What a scheduler says of the work that waits: the signal that instances are scaled by."""

from epd_engine.core.encode_scheduler import EncodeScheduler
from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import ModelRunnerOutput
from epd_engine.core.scheduler import Scheduler, SchedulerLimits
from epd_engine.ec_transfer.base import ECConnectorOutput
from tests.support.engine_objects import SetConnector, item, key, request


def test_media_count_until_their_request_is_answered() -> None:
    planner = MediaPlanner(
        EncoderCacheManager(16),
        SetConnector(set(), role="ec_producer"),
        max_encoder_embeds=4,
        can_compute=True,
    )
    scheduler = EncodeScheduler(planner)
    assert scheduler.num_queued_tokens == 0
    scheduler.add(request("r", 0, [item("a", 0, 4, pixels=True), item("b", 0, 3, pixels=True)]))
    scheduler.add(request("s", 0, [item("c", 0, 4, pixels=True)]))
    assert scheduler.num_queued_tokens == 11
    for names in ("a", "b"):
        step = scheduler.schedule()
        scheduler.update(
            step, ModelRunnerOutput(ec_output=ECConnectorOutput(finished_sending={key(n) for n in names}))
        )
    assert scheduler.num_queued_tokens == 4
    scheduler.abort("s")
    assert scheduler.num_queued_tokens == 0


def test_prompts_count_by_what_is_left_of_them() -> None:
    planner = MediaPlanner(EncoderCacheManager(16), None, max_encoder_embeds=4, can_compute=False)
    scheduler = Scheduler(SchedulerLimits(8, 16, 128), BlockPool(64, 4), planner)
    scheduler.add(request("long", 40))
    following = request("next", 10)
    following.prompt_token_ids = list(range(100, 110))  # nothing of it is known from the first
    scheduler.add(following)
    assert scheduler.num_queued_tokens == 50
    left = []
    for _ in range(4):
        step = scheduler.schedule()
        sampled = {chunk.request.request_id: 7 for chunk in step.chunks if chunk.samples}
        scheduler.update(step, ModelRunnerOutput(sampled=sampled))
        left.append(scheduler.num_queued_tokens)
    assert left == [34, 18, 2, 0], "a step computes 16 tokens, and answers under way queue nothing"
