"""`SharedStorageKVConnector`: a prompt's KV as files on a volume that prefill and decode mount.

What if a peer is slow, dead, restarted or lies?
- Prefill dies before its answer: temporary files and whole ones that nobody knows of; they go by their age.
- Prefill dies after its answer: the files are there, and decode goes on from them.
- Decode never comes: prefill removes the files at the end of their lease.
- Decode dies with the files taken: they go by their age, swept by whoever produces here, and the janitor.
- A file is torn, altered, another prompt's or another model's: a miss for that request.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.core.remote_kv import RemoteDecode, RemotePrefill, prompt_digest
from epd_engine.core.request import Request
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.kv_area import is_older, transfers
from epd_engine.ec_store.layout import DIRECTORY_MODE, LOCAL_TYPES
from epd_engine.ec_store.mounts import MEMORY_TYPES, filesystem_type
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.kv_transfer.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVModelIdentity,
)
from epd_engine.kv_transfer.block_file import BlockRange, gather
from epd_engine.kv_transfer.block_loader import BlockLoad, BlockLoader
from epd_engine.kv_transfer.block_saver import BlockSaver, Transfer, remove_quietly
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig, read_extra_config
from epd_engine.kv_transfer.params import check_prompt_length, missing, prefilled

if TYPE_CHECKING:
    from epd_engine.attention.kv_cache import KVCache
    from epd_engine.core.output import SchedulerOutput

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "shared_storage_path": "/tmp",
    "fsync": None,  # None: unless the path is in memory
    "lease_seconds": 60.0,  # how long a prompt's files wait for a decode instance
    "orphan_seconds": 3600.0,  # when what dead instances left is removed; longer than any answer takes
}
SWEEP_SECONDS = 60.0


@dataclass(frozen=True)
class BlockSave:
    """Blocks `block_ids` are those from `first` on of a prompt of `num_tokens`."""

    request_id: str
    transfer_id: str
    digest: str
    first: int
    block_ids: tuple[int, ...]
    tokens_in_last: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.first + len(self.block_ids)


@dataclass
class BlockPlan(KVConnectorMetadata):
    """A step's work. `drops` are transfers that this instance made, by id; `releases` those it took."""

    saves: dict[str, BlockSave] = field(default_factory=dict)
    loads: list[BlockLoad] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self.loads or self.drops or self.releases)


@dataclass
class _Sending:
    """The scheduler side's view of a prompt that is handed on: file ranges end at `ends`."""

    transfer_id: str
    digest: str
    ends: list[int] = field(default_factory=list)


class SharedStorageKVConnector(KVConnectorBase):
    """Producers save layer by layer while they compute; consumers load in the background, then delete."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, identity: KVModelIdentity):
        super().__init__(config, role, identity)
        extra = _read(config)
        self._root = Path(extra["shared_storage_path"])
        self._base = self._root / identity.fingerprint[:16]
        self._lease_seconds, self._orphan_seconds = extra["lease_seconds"], extra["orphan_seconds"]
        self._engine_id = config.engine_id or secrets.token_hex(16)
        # Scheduler side
        self._plan = BlockPlan()
        self._sending: dict[str, _Sending] = {}  # by request
        self._saved: set[str] = set()  # requests that still run, saved already
        self._promised: dict[str, str] = {}  # requests that have ended and are being saved, to transfer
        self._leases: dict[str, float] = {}  # transfer to the end of its lease
        self.clock = time.monotonic
        # Worker side
        self._transfers: dict[str, Transfer] = {}
        self._loads: dict[str, tuple[Future[int], float]] = {}
        self._output = KVConnectorOutput()
        self._stats = TransferStats()
        if role is KVConnectorRole.WORKER:
            self._start(extra)

    # Scheduler side

    def check_request(self, request: Request) -> None:
        if not isinstance(request.kv, RemotePrefill):
            return
        check_prompt_length(request, request.kv)
        ends = request.kv.connector.get("block_ends")
        if set(request.kv.connector) != {"block_ends"} or not _are_ends(ends, self._blocks_of(request)):
            raise missing("kv_transfer_params.connector does not name the files of the whole prompt")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not isinstance(request.kv, RemotePrefill):
            return 0
        return max(0, request.num_prompt_tokens - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> None:
        assert isinstance(request.kv, RemotePrefill)
        first = (request.num_prompt_tokens - num_external_tokens) // self.identity.block_size
        self._plan.loads.append(
            BlockLoad(
                request.request_id,
                request.kv.transfer_id,
                prompt_digest(request),
                tuple(request.kv.connector["block_ends"]),
                first,
                tuple(request.block_ids[first : self._blocks_of(request)]),
            )
        )

    def build_connector_meta(self, step: "SchedulerOutput") -> BlockPlan:
        plan, self._plan = self._plan, BlockPlan()
        for chunk in step.chunks:
            if isinstance(chunk.request.kv, RemoteDecode):
                self._plan_save(chunk.request, chunk.end, plan)
        now = self.clock()
        for transfer_id in [t for t, end in self._leases.items() if end <= now]:
            del self._leases[transfer_id]
            plan.drops.append(transfer_id)
        return plan

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id, end in output.saving.items():
            if request_id in self._sending:
                self._sending[request_id].ends.append(end)
        for request_id in output.finished_sending:
            if request_id in self._promised:
                self._begin_lease(self._promised.pop(request_id))
            elif request_id in self._sending:
                self._saved.add(request_id)

    def request_finished(self, request: Request, *, completed: bool) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(request.kv, RemotePrefill):
            self._plan.releases.append(request.kv.transfer_id)
            return False, None
        sending = self._sending.pop(request.request_id, None)
        is_saved = request.request_id in self._saved
        self._saved.discard(request.request_id)
        if sending is None:
            return False, None
        if not completed:
            self._plan.drops.append(sending.transfer_id)
            return False, None
        if is_saved:
            self._begin_lease(sending.transfer_id)
        else:
            self._promised[request.request_id] = sending.transfer_id
        return False, prefilled(
            self.identity,
            engine_id=self._engine_id,
            transfer_id=sending.transfer_id,
            num_prompt_tokens=request.num_prompt_tokens,
            first_token_id=request.output_token_ids[0],
            connector={"block_ends": sending.ends},
        )

    def discard(self, request_id: str) -> None:
        if (transfer_id := self._promised.pop(request_id, None)) is not None:
            self._plan.drops.append(transfer_id)

    def _begin_lease(self, transfer_id: str) -> None:
        self._leases[transfer_id] = self.clock() + self._lease_seconds

    def _plan_save(self, request: Request, computed: int, plan: BlockPlan) -> None:
        """What of the prompt is complete after this step, from where the last range ended."""
        sending = self._sending.get(request.request_id)
        if sending is None:
            sending = _Sending(secrets.token_hex(32), prompt_digest(request))
            self._sending[request.request_id] = sending
        size, length = self.identity.block_size, request.num_prompt_tokens
        is_last = computed >= length
        end = self._blocks_of(request) if is_last else computed // size
        first = sending.ends[-1] if sending.ends else 0
        if end > first:
            tokens = length - (end - 1) * size if is_last else size
            block_ids = tuple(request.block_ids[first:end])
            plan.saves[request.request_id] = BlockSave(
                request.request_id, sending.transfer_id, sending.digest, first, block_ids, tokens, is_last
            )

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self.identity.block_size)

    # Worker side

    def register_kv_caches(self, kv_cache: "KVCache") -> None:
        super().register_kv_caches(kv_cache)
        self._loader = BlockLoader(self.identity, self._base, kv_cache, patient=self._patient)

    def start_load_kv(self) -> None:
        plan = self._bound
        for transfer_id in plan.drops:
            transfer = self._transfers.pop(transfer_id, None)
            self._request_of.pop(transfer_id, None)
            self._saver.drop(transfer or Transfer(transfer_id, self._base / transfer_id))
        for transfer_id in plan.releases:
            self._loader.release(transfer_id)
        for load in plan.loads:
            self._loads[load.request_id] = self._loader.load(load, self.on_progress), time.perf_counter()
        self._begun: dict[str, torch.Tensor] = {}

    def save_kv_layer(self, layer: int, request_ids: frozenset[str]) -> None:
        for request_id in request_ids & self._bound.saves.keys():
            save = self._bound.saves[request_id]
            ids = self._begun.get(request_id)
            if ids is None:
                ids = self._begun[request_id] = torch.tensor(save.block_ids, device=self._kv_cache.device)
            tensor = gather(self._kv_cache.layers[layer], ids, save.tokens_in_last)
            blocks = BlockRange(self.identity, save.digest, save.first, save.end)
            self._saver.write(self._transfer(save), blocks, layer, tensor)
            self._stats.save_bytes += tensor.nbytes

    def wait_for_save(self) -> None:
        """The copies are made already; what is left is to give the files their names."""
        for request_id in self._begun:
            save = self._bound.saves[request_id]
            self._output.saving[request_id] = save.end
            self._saver.publish(self._transfer(save), last=save.is_last)

    def get_finished(self) -> KVConnectorOutput:
        self._sweep()
        for transfer in [t for t in self._transfers.values() if t.is_done and not t.is_reported]:
            transfer.is_reported = True
            request_id = self._request_of[transfer.transfer_id]
            if transfer.failure is not None:
                # Known until it is dropped: later ranges of the prompt must not be taken for all of it.
                self._output.failed_sending[request_id] = transfer.failure
                continue
            del self._transfers[transfer.transfer_id], self._request_of[transfer.transfer_id]
            self._output.finished_sending.add(request_id)
        for request_id, (future, begun) in list(self._loads.items()):
            if future.done():
                del self._loads[request_id]
                self._settle(request_id, future, time.perf_counter() - begun)
        output, self._output = self._output, KVConnectorOutput()
        return output

    def statistics(self) -> TransferStats:
        return self._stats

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._saver.close()
            self._loader.close()

    @property
    def _bound(self) -> BlockPlan:
        assert isinstance(self._metadata, BlockPlan), "bound before use"
        return self._metadata

    def _start(self, extra: Mapping[str, Any]) -> None:
        if "shared_storage_path" not in self.config.kv_connector_extra_config:
            log.warning("shared_storage_path is not set: KV crosses in %s", self._root)
        try:
            for directory in (self._root, self._base):
                if not directory.is_dir():
                    directory.mkdir(parents=True, exist_ok=True)
                    directory.chmod(DIRECTORY_MODE)
        except OSError as error:
            raise KVConfigError(
                f"shared_storage_path {self._root} cannot be used: {error.strerror}"
            ) from error
        kind = filesystem_type(self._root)
        self._patient = kind not in LOCAL_TYPES
        fsync = kind not in MEMORY_TYPES if extra["fsync"] is None else extra["fsync"]
        self._saver = BlockSaver(fsync=fsync, on_progress=lambda: self.on_progress())
        self._request_of: dict[str, str] = {}
        self._sweep_due = 0.0

    def _transfer(self, save: BlockSave) -> Transfer:
        transfer = self._transfers.get(save.transfer_id)
        if transfer is None:
            transfer = Transfer(save.transfer_id, self._base / save.transfer_id)
            self._transfers[save.transfer_id] = transfer
            self._request_of[save.transfer_id] = save.request_id
        return transfer

    def _settle(self, request_id: str, future: "Future[int]", seconds: float) -> None:
        try:
            self._stats.loaded(future.result(), seconds)
        except (EntryDamaged, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning("KV cannot be loaded: %s", reason, extra={"request_id": request_id})
            self._output.failed_recving[request_id] = str(reason)
        else:
            self._output.finished_recving.add(request_id)

    def _sweep(self) -> None:
        """Removes what dead instances have left, once a minute, or as often as that grows old."""
        if not self.config.is_producer or self.clock() < self._sweep_due:
            return
        self._sweep_due = self.clock() + min(SWEEP_SECONDS, self._orphan_seconds)
        self._saver.run(lambda: sweep(self._root, self._orphan_seconds))


def sweep(area: Path, older_than: float) -> None:
    """Removes transfers of the area in which nothing has changed for so many seconds."""
    for transfer in transfers(area):
        if is_older(transfer, time.time() - older_than):
            log.info("removing KV that nobody came for: %s", transfer.name)
            remove_quietly(transfer)


def _read(config: KVTransferConfig) -> dict[str, Any]:
    extra = read_extra_config(config, DEFAULTS)
    if type(extra["fsync"]) not in (bool, type(None)):
        raise KVConfigError("kv_connector_extra_config key 'fsync' must be a bool, or null for automatic")
    for key in ("lease_seconds", "orphan_seconds"):
        if extra[key] <= 0:
            raise KVConfigError(f"kv_connector_extra_config key {key!r} must be more than 0")
    if extra["orphan_seconds"] < extra["lease_seconds"]:
        raise KVConfigError("kv_connector_extra_config key 'orphan_seconds' must not be below lease_seconds")
    return extra


def _are_ends(ends: Any, num_blocks: int) -> bool:
    """Whether `ends` are those of ranges that make up `num_blocks` blocks."""
    if not isinstance(ends, list) or not ends or len(ends) > num_blocks:
        return False
    if not all(type(end) is int for end in ends):
        return False
    return ends[-1] == num_blocks and all(a < b for a, b in zip([0, *ends[:-1]], ends, strict=True))
