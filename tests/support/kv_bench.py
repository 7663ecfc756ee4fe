"""Prefill and decode schedulers as pure objects: a connector's scheduler side, and a dict as the volume."""

from collections.abc import Callable

import torch

from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.kv_blocks import BlockPool
from epd_engine.core.media_planner import MediaPlanner
from epd_engine.core.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.remote_kv import RemoteDecode, RemoteKV
from epd_engine.core.request import MediaItem, Request
from epd_engine.core.scheduler import Scheduler, SchedulerLimits
from epd_engine.kv_transfer.base import KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.config import KVTransferConfig
from epd_engine.kv_transfer.params import parse
from epd_engine.kv_transfer.shared_storage_connector import BlockPlan, SharedStorageKVConnector
from tests.support.engine_objects import SetConnector, request

BLOCK = 4
IDENTITY = KVModelIdentity("f" * 64, torch.float32, BLOCK, 3, 2, 8, vocab_size=1000)
BOTH = KVTransferConfig("SharedStorageKVConnector", "kv_both")

Volume = dict[str, list[object]]  # what lies in each slot of a transfer's blocks


class KVBench:
    """One instance. `hold_saves` and `hold_loads` keep the background from finishing."""

    def __init__(self, volume: Volume, *, blocks: int = 32, tokens: int = 16, seqs: int = 8):
        self.volume, self.now = volume, 0.0
        self.pool = BlockPool(blocks, BLOCK)
        self.connector = SharedStorageKVConnector(BOTH, KVConnectorRole.SCHEDULER, IDENTITY)
        self.connector.clock = lambda: self.now
        self.ec = SetConnector(set())
        planner = MediaPlanner(EncoderCacheManager(64), self.ec, max_encoder_embeds=16, can_compute=True)
        self.scheduler = Scheduler(SchedulerLimits(seqs, tokens, 128), self.pool, planner, self.connector)
        self.memory: dict[int, object] = {}  # by slot
        self.computed: list[tuple[str, int, int]] = []
        self.hold_saves = self.hold_loads = self.fail_saves = False
        self._saving: dict[str, Callable[[], None]] = {}
        self._loading: list[Callable[[ModelRunnerOutput], None]] = []
        self._output = ModelRunnerOutput()
        self._foreseen: SchedulerOutput | None = None
        self.told: dict[str, list[int]] = {}
        self.ends: dict[str, RequestUpdate] = {}

    def add(
        self,
        name: str,
        length: int,
        kv: RemoteKV | None,
        *,
        media: list[MediaItem] | None = None,
        max_tokens: int = 4,
        salt: str = "",
    ) -> Request:
        made = request(name, length, media, 1 if isinstance(kv, RemoteDecode) else max_tokens)
        made.kv, made.cache_salt = kv, salt
        self.scheduler.add(made)
        return made

    def step(self) -> SchedulerOutput:
        foreseen, self._foreseen = self._foreseen, None
        step = foreseen if foreseen and self.scheduler.confirm(foreseen) else self.scheduler.schedule()
        self._foreseen = self.scheduler.foresee(step)
        output, self._output = self._output, ModelRunnerOutput()
        for chunk in step.chunks:
            self._compute(chunk.request, chunk.start, chunk.end)
            if chunk.samples:
                output.sampled[chunk.request.request_id] = 100 + chunk.end
        assert isinstance(step.kv_connector_metadata, BlockPlan)
        self._transfer(step.kv_connector_metadata, output)
        for update in self.scheduler.update(step, output):
            self.told.setdefault(update.request_id, []).extend(update.new_token_ids)
            if update.is_last:
                assert update.request_id not in self.ends, "a request ends once"
                self.ends[update.request_id] = update
        return step

    def run(self, limit: int = 300) -> None:
        for _ in range(limit):
            if self.scheduler.num_running + self.scheduler.num_waiting == 0:
                self.step()  # what is to be dropped goes
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def assert_at_rest(self) -> None:
        assert self.scheduler.problems() == []
        assert self.pool.num_free == self.pool.num_blocks

    def _slots(self, block_ids: list[int] | tuple[int, ...]) -> list[int]:
        return [block * BLOCK + n for block in block_ids for n in range(BLOCK)]

    def _compute(self, of: Request, start: int, end: int) -> None:
        slots, history = self._slots(of.block_ids), pasts(of, end)
        for n in range(start):
            assert self.memory.get(slots[n]) == history[n], "KV is not the request's own"
        for n in range(start, end):
            self.memory[slots[n]] = history[n]
        self.computed.append((of.request_id, start, end))

    def _transfer(self, plan: BlockPlan, output: ModelRunnerOutput) -> None:
        for transfer in plan.drops + plan.releases:
            self.volume.pop(transfer, None)
            self._saving.pop(transfer, None)
        for save in plan.saves.values():
            content = [self.memory.get(slot) for slot in self._slots(save.block_ids)]
            output.kv_output.saving[save.request_id] = save.end
            place = self.volume.setdefault(save.transfer_id, [])
            assert len(place) == save.first * BLOCK, "ranges follow one another"
            place += content
            if save.is_last:
                finish = output.kv_output.finished_sending
                self._saving[save.transfer_id] = lambda name=save.request_id, f=finish: f.add(name)  # type: ignore[misc]
                if self.fail_saves:
                    self._saving.pop(save.transfer_id)
                    output.kv_output.failed_sending[save.request_id] = "no space"
        if not self.hold_saves:
            for transfer in list(self._saving):
                name = self._saving.pop(transfer).__defaults__[0]  # type: ignore[attr-defined]
                output.kv_output.finished_sending.add(name)
        for load in plan.loads:
            self._loading.append(lambda out, load=load: self._load(load, out))  # type: ignore[misc]
        if not self.hold_loads:
            while self._loading:
                self._loading.pop()(output)

    def _load(self, load, output: ModelRunnerOutput) -> None:  # type: ignore[no-untyped-def]
        if load.transfer_id not in self.volume:
            output.kv_output.failed_recving[load.request_id] = "gone"
            return
        content = self.volume[load.transfer_id][load.first * BLOCK : load.ends[-1] * BLOCK]
        self.memory.update(zip(self._slots(load.block_ids), content, strict=True))
        output.kv_output.finished_recving.add(load.request_id)


def pasts(of: Request, end: int) -> list[int]:
    """For each token a number that stands for it and for everything before it, media included."""
    chain, found = hash(of.cache_salt), []
    for n, token in enumerate(of.tokens(0, end)):
        media = [(of.media[i].mm_hash, n - of.media[i].offset) for i in of.media_in(n, n + 1)]
        chain = hash((chain, token, tuple(media)))
        found.append(chain)
    return found


def handed_on(bench: KVBench, name: str) -> RemoteKV:
    """What `bench` answered to a prefill, as a decode instance reads it."""
    kv = parse(bench.ends[name].kv_transfer_params, BOTH, IDENTITY)
    assert kv is not None
    return kv
