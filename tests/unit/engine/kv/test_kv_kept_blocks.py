"""A connector whose peers pull from the pool itself: blocks stay until they have, answers do not wait."""

from typing import Any

from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import ModelRunnerOutput, RequestUpdate
from epd_engine.core.remote_kv import RemoteDecode
from epd_engine.core.request import Request
from epd_engine.core.scheduler import Scheduler, SchedulerLimits
from epd_engine.kv_transfer.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from tests.support.engine_objects import request
from tests.support.kv_bench import BOTH, IDENTITY


class Pulled(KVConnectorBase):
    """The scheduler side alone."""

    def check_request(self, request: Request) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 0

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, step: object) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, *, completed: bool) -> tuple[bool, dict[str, Any] | None]:
        return completed, {"blocks": list(request.block_ids)} if completed else None

    def discard(self, request_id: str) -> None: ...

    def start_load_kv(self) -> None: ...

    def save_kv_layer(self, layer: int, request_ids: frozenset[str]) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self) -> KVConnectorOutput:
        return KVConnectorOutput()


class Prefill:
    def __init__(self) -> None:
        self.pool = BlockPool(8, 4)
        planner = MediaPlanner(EncoderCacheManager(8), None, max_encoder_embeds=8, can_compute=False)
        connector = Pulled(BOTH, KVConnectorRole.SCHEDULER, IDENTITY)
        self.scheduler = Scheduler(SchedulerLimits(4, 64, 128), self.pool, planner, connector)

    def add(self, name: str, length: int) -> None:
        made = request(name, length, max_tokens=1)
        made.kv = RemoteDecode()
        self.scheduler.add(made)

    def step(self, output: KVConnectorOutput | None = None) -> list[RequestUpdate]:
        step = self.scheduler.schedule()
        done = ModelRunnerOutput(sampled={c.request.request_id: 7 for c in step.chunks if c.samples})
        done.kv_output = output or KVConnectorOutput()
        return self.scheduler.update(step, done)


def test_blocks_stay_until_they_are_pulled_and_are_no_leak_meanwhile() -> None:
    prefill = Prefill()
    prefill.add("p", 9)
    (update,) = prefill.step()
    assert update.kv_transfer_params == {"blocks": [0, 1, 2]}
    assert prefill.scheduler.num_waiting == 0, "an instance at rest may sleep"
    assert prefill.pool.num_free == 5
    assert prefill.scheduler.problems() == []
    assert prefill.scheduler.owes_kv, "an instance that is told to end waits"
    prefill.step(KVConnectorOutput(finished_sending={"p"}))
    assert prefill.pool.num_free == 8
    assert prefill.scheduler.problems() == []
    assert not prefill.scheduler.owes_kv


def test_blocks_that_two_prompts_share_stay_until_both_are_pulled() -> None:
    prefill = Prefill()
    for name in ("p", "q"):
        prefill.add(name, 9)
        prefill.step()
    assert prefill.pool.num_free == 4, "two of three blocks are the same"
    assert prefill.scheduler.problems() == []
    prefill.step(KVConnectorOutput(failed_sending={"p": "its lease is over"}))
    assert prefill.scheduler.problems() == []
    prefill.step(KVConnectorOutput(finished_sending={"q"}))
    assert prefill.pool.num_free == 8
    assert prefill.scheduler.problems() == []


def test_a_request_waits_while_blocks_are_kept() -> None:
    prefill = Prefill()
    prefill.add("p", 28)
    prefill.step()
    prefill.add("q", 8)
    prefill.scheduler._waiting[0].cache_salt = "other"
    assert prefill.step() == []
    assert [u.request_id for u in prefill.step(KVConnectorOutput(finished_sending={"p"}))] == []
    assert [u.request_id for u in prefill.step()] == ["q"]
