"""`ECSharedMemoryConnector`: entries in the memory of one node, for the producers and consumers on it.

After vllm#44049, with an arena a producer in place of a segment an item, leases in place of one
acknowledgement byte, and a ledger that hears of every success and failure (docs/ec-store.md).
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.ec_store.arena import sweep
from epd_engine.ec_store.arena.layout import Geometry
from epd_engine.ec_store.arena.store import MemoryStore
from epd_engine.ec_store.arena.writer import ArenaWriter, check_mount, text_of
from epd_engine.ec_store.errors import StoreError
from epd_engine.ec_store.ranges import rounded
from epd_engine.ec_transfer.base import ECConnectorOutput, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.cache_manager import ECConnectorCacheManager
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig, read_extra_config
from epd_engine.ec_transfer.store_connector import StoreConnector, StorePlan

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "path": None,
    "namespace": None,  # None: the first 16 digits of the model fingerprint
    "capacity": None,  # bytes that all producers may take together; None: nine tenths of the mount
    "lease_seconds": 60.0,
    "verify": "never",
}
_CAPACITY_SHARE = 0.9
_UPKEEP_SECONDS = 1.0


@dataclass
class SharedMemoryPlan(StorePlan):
    """Offsets are bytes in the producer's arena; what is freed is freed before anything is saved."""

    frees: list[str] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    end: int | None = None
    """Memory beyond this is to be given back."""

    @property
    def has_work(self) -> bool:
        return bool(self.frees) or self.end is not None


class ECSharedMemoryConnector(StoreConnector):
    """Producers write their own arena and share the capacity evenly; consumers copy out of all of them."""

    tier = "memory"

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity):
        """Raises `ECConfigError`, also where `path` is on no tmpfs or the capacity does not fit."""
        extra = _read(config)
        self._root = Path(extra["path"])
        base = self._root / (identity.fingerprint[:16] if extra["namespace"] is None else extra["namespace"])
        super().__init__(config, role, identity, base=base, lease_seconds=extra["lease_seconds"])
        self._checksums = extra["verify"] == "always"
        self.store = MemoryStore(base, verify=self._checksums)
        self._capacity = _capacity(self._root, extra["capacity"])
        self._looked_after = 0.0
        self.manager: ECConnectorCacheManager | None = None
        self._writer: ArenaWriter | None = None
        if not config.is_producer:
            return
        geometry = Geometry.of(self._capacity)
        if role is ECConnectorRole.SCHEDULER:
            self.manager = ECConnectorCacheManager(self._capacity, geometry.slots, self.leases.everyones)
        else:
            for arena in sweep(self._root):
                log.info("swept %s, which a dead process left", arena)
            try:
                check_mount(base, geometry)
                if config.is_encode_only:
                    self._writer = self._make_arena()
            except (StoreError, OSError) as error:
                raise ECConfigError(str(error)) from error

    # Scheduler side

    def refusal(self, item: "MediaItem") -> str | None:
        if self.config.is_encode_only and self._bytes_of(item) > self._capacity:
            return (
                f"an item of {self._bytes_of(item)} bytes exceeds the EC store's capacity ({self._capacity})"
            )
        return None

    def ensure_cache_available(self, request: "Request", index: int) -> bool:
        """An instance whose only purpose is to publish waits for room; `ec_both` computes all the same."""
        item = request.media[index]
        if self.manager is None or not self.config.is_encode_only:
            return True
        if self._bytes_of(item) > self.manager.capacity:
            return True  # never: `update_state_after_alloc` says so
        return self._allocate(request, index)

    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        item = request.media[index]
        plan = self._plan
        assert isinstance(plan, SharedMemoryPlan)
        if load or self.manager is None:
            super().update_state_after_alloc(request, index, load=load)
        elif self._allocate(request, index):
            entry = self.manager.get(item.mm_hash)
            assert entry is not None
            plan.saves[item.mm_hash] = item
            plan.offsets[item.mm_hash] = entry.offset
        else:
            plan.saves[item.mm_hash] = item
            plan.refused[item.mm_hash] = (
                f"{self._bytes_of(item)} bytes do not fit into this producer's share of the EC store "
                f"({self.manager.num_bytes} of {self.manager.capacity} bytes are taken)"
            )

    def build_connector_meta(self) -> StorePlan:
        if self.manager is not None:
            plan = self._plan
            assert isinstance(plan, SharedMemoryPlan)
            self._look_after(self.manager, plan)
            plan.frees = self.manager.take_freed()
        return super().build_connector_meta()

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        super().update_connector_output(output)
        if self.manager is None:
            return
        for key in output.finished_sending:
            self.manager.published(key)
        for key in output.failed_sending:
            self.manager.failed(key)
        for key in output.acknowledged:
            self.manager.used(key)

    def request_finished(self, request: "Request") -> tuple[bool, Mapping[str, Any] | None]:
        if self.manager is not None:
            for index, item in enumerate(request.media):
                self.manager.release(item.mm_hash, (request.request_id, index))
        return super().request_finished(request)

    def _new_plan(self) -> StorePlan:
        return SharedMemoryPlan()

    def _probe(self, item: "MediaItem", *, deep: bool) -> None:
        self.store.probe(item.mm_hash, self.identity.expectation(item), deep=deep)

    def _allocate(self, request: "Request", index: int) -> bool:
        assert self.manager is not None
        item = request.media[index]
        occurrence = (request.request_id, index)
        return (
            self.manager.allocate(item.mm_hash, occurrence, item.num_embeds, self._bytes_of(item)) is not None
        )

    def _bytes_of(self, item: "MediaItem") -> int:
        """Bytes that an item takes in an arena."""
        payload = item.num_embeds * self.identity.width * self.identity.dtype.itemsize
        return rounded(payload + len(text_of(item.modality, item.metadata)))

    def _look_after(self, manager: ECConnectorCacheManager, plan: "SharedMemoryPlan") -> None:
        """Now and then: the dead are swept, and the capacity is shared with whoever has come or gone."""
        now = time.monotonic()
        if now - self._looked_after < _UPKEEP_SECONDS:
            return
        self._looked_after = now
        sweep(self._root)
        before = manager.capacity
        manager.resize(self._capacity // max(1, self.store.num_arenas))
        if manager.capacity < before or manager.end > manager.capacity:
            plan.end = max(manager.capacity, manager.end)

    # Worker side

    def free_physical_cache(self) -> None:
        plan = self._bound
        assert isinstance(plan, SharedMemoryPlan)
        if self._writer is None:
            return
        for key in plan.frees:
            self._writer.retire(key)
        if plan.end is not None:
            self._writer.shrink(plan.end)

    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        plan = self._bound
        assert isinstance(plan, SharedMemoryPlan)
        item = plan.saves.pop(mm_hash, None)
        if item is None:
            return
        if mm_hash in plan.refused:
            self._output.failed_sending[mm_hash] = plan.refused[mm_hash]
            return
        begun = time.perf_counter()
        try:
            if self._writer is None or not self._writer.is_linked:
                self._writer = self._make_arena()
            self._writer.put(
                mm_hash,
                plan.offsets[mm_hash],
                encoder_cache[mm_hash],
                modality=item.modality,
                metadata=item.metadata,
            )
        except StoreError as error:
            log.error("entry %s cannot be saved: %s", mm_hash, error)
            self._output.failed_sending[mm_hash] = str(error)
        else:
            self._output.finished_sending.add(mm_hash)
            self.transfers.saved(encoder_cache[mm_hash].nbytes, time.perf_counter() - begun)

    def wait_for_save(self) -> None:
        """A save is over when `save_caches` returns: it is a copy within memory."""

    def shutdown(self) -> None:
        super().shutdown()
        if self._writer is not None:
            self._writer.close()

    def _make_arena(self) -> ArenaWriter:
        """At the first save where saves are rare: each arena takes an even share of the capacity."""
        return ArenaWriter(
            self.store.directory,
            self._capacity,
            fingerprint=self.identity.fingerprint,
            checksums=self._checksums,
        )

    def _load(self, item: "MediaItem") -> torch.Tensor:
        return self.store.load(item.mm_hash, self.identity.expectation(item), self._device)


def _read(config: ECTransferConfig) -> dict[str, Any]:
    extra = read_extra_config(config, DEFAULTS)
    if not isinstance(extra["path"], str):
        raise ECConfigError(
            "ec_connector_extra_config key 'path' is needed: a directory on a tmpfs that all instances see"
        )
    capacity = extra["capacity"]
    if capacity is not None and (type(capacity) is not int or capacity <= 0):
        raise ECConfigError("ec_connector_extra_config key 'capacity' must be bytes, more than 0")
    if extra["lease_seconds"] <= 0:
        raise ECConfigError("ec_connector_extra_config key 'lease_seconds' must be more than 0")
    if extra["verify"] not in ("always", "never"):
        raise ECConfigError("ec_connector_extra_config key 'verify' must be 'always' or 'never'")
    return extra


def _capacity(root: Path, wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    try:
        stats = os.statvfs(root)
    except OSError as error:
        raise ECConfigError(f"path {root} cannot be used: {error.strerror}") from error
    return int(stats.f_blocks * stats.f_frsize * _CAPACITY_SHARE)
