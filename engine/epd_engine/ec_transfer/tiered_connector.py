"""`ECTieredConnector`: the memory of a node in front of a volume's files, as one connector.

A look-up asks memory, then the files; a load that memory cannot serve after all is served by the files, and
what came from the files is promoted into memory for the next reader. An item is published where at least one
tier has it: a miss in one tier is not a miss, nor is a failure.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECModelIdentity,
)
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig, read_extra_config
from epd_engine.ec_transfer.shared_memory_connector import ECSharedMemoryConnector
from epd_engine.ec_transfer.shared_storage_connector import ECSharedStorageConnector
from epd_engine.ec_transfer.store_connector import StorePlan

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "memory": {},  # the extra config of ECSharedMemoryConnector
    "storage": {},  # the extra config of ECSharedStorageConnector
    "write": "through",  # or "back": an answer waits for memory alone
}
MEMORY, STORAGE = "memory", "storage"
_WRITE_BACK = ("write-back", 0)  # holds an entry in memory until the files have it


@dataclass
class TieredPlan(ECConnectorMetadata):
    """The tiers' own plans for saves; loads are planned here, since one tier may stand in for the other."""

    memory: StorePlan
    storage: StorePlan
    memory_loads: dict[str, "MediaItem"] = field(default_factory=dict)
    storage_loads: dict[str, "MediaItem"] = field(default_factory=dict)
    promotions: set[str] = field(default_factory=set)

    @property
    def has_work(self) -> bool:
        return self.memory.has_work


class ECTieredConnector(ECConnectorBase):
    """Two connectors with one plan. Each keeps its own ledger and leases."""

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity):
        """Raises `ECConfigError`, for a tier's extra config as well."""
        super().__init__(config, role, identity)
        extra = read_extra_config(config, DEFAULTS)
        if extra["write"] not in ("through", "back"):
            raise ECConfigError("ec_connector_extra_config key 'write' must be 'through' or 'back'")
        self._writes_back = extra["write"] == "back"
        # A consumer writes what it promotes, and nothing else.
        in_memory = "ec_both" if config.is_consumer else config.ec_role
        self.memory = ECSharedMemoryConnector(
            _tier(config, "ECSharedMemoryConnector", extra[MEMORY], in_memory), role, identity
        )
        self.storage = ECSharedStorageConnector(
            _tier(config, "ECSharedStorageConnector", extra[STORAGE], config.ec_role), role, identity
        )
        self._in_files: set[str] = set()
        self._plan = self._new_plan()
        self._saves = _Saves(waits_for_files=not self._writes_back)

    # Scheduler side

    def has_cache_item(self, item: "MediaItem") -> bool:
        if self.memory.has_cache_item(item):
            self._in_files.discard(item.mm_hash)
            return True
        if self.storage.has_cache_item(item):
            self._in_files.add(item.mm_hash)
            return True
        return False

    def is_published(self, item: "MediaItem") -> bool:
        return self.memory.is_published(item) or self.storage.is_published(item)

    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        item = request.media[index]
        if not load:
            self.memory.update_state_after_alloc(request, index, load=False)
            self.storage.update_state_after_alloc(request, index, load=False)
            if self._writes_back and self.memory.manager is not None:
                self.memory.manager.reference(item.mm_hash, _WRITE_BACK)
        elif item.mm_hash in self._in_files:
            self._in_files.discard(item.mm_hash)
            self._plan.storage_loads[item.mm_hash] = item
            self._plan.promotions.add(item.mm_hash)
            self.memory.update_state_after_alloc(request, index, load=False)
        else:
            self._plan.memory_loads[item.mm_hash] = item

    def acknowledge(self, item: "MediaItem") -> None:
        self.memory.acknowledge(item)
        self.storage.acknowledge(item)

    def build_connector_meta(self) -> TieredPlan:
        plan, self._plan = self._plan, self._new_plan()
        plan.memory = self.memory.build_connector_meta()
        plan.storage = self.storage.build_connector_meta()
        return plan

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        for name, tier in ((MEMORY, self.memory), (STORAGE, self.storage)):
            did = output.tiers.get(name)
            if did is None:  # a step that failed: what it would have saved is in neither
                did = ECConnectorOutput(failed_sending=output.failed_sending)
            # Wherever it was loaded from: both tiers kept it for this reader.
            tier.update_connector_output(
                dataclasses.replace(
                    did, finished_recving=output.finished_recving, failed_recving=output.failed_recving
                )
            )
        files = output.tiers.get(STORAGE)
        if files is not None and self.memory.manager is not None:
            for key in files.finished_sending | set(files.failed_sending):
                self.memory.manager.release(key, _WRITE_BACK)

    def settle(self, items: Sequence["MediaItem"]) -> ECConnectorOutput:
        in_memory, in_files = self.memory.settle(items), self.storage.settle(items)
        finished = in_memory.finished_sending | in_files.finished_sending
        failed = {key: reason for key, reason in in_files.failed_sending.items() if key not in finished}
        return ECConnectorOutput(finished_sending=finished, failed_sending=failed)

    def request_finished(self, request: "Request") -> tuple[bool, Mapping[str, Any] | None]:
        self.memory.request_finished(request)
        return super().request_finished(request)

    def _new_plan(self) -> TieredPlan:
        return TieredPlan(StorePlan(), StorePlan())

    # Worker side

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        assert isinstance(metadata, TieredPlan)
        super().bind_connector_metadata(metadata)
        self.memory.bind_connector_metadata(metadata.memory)
        self.storage.bind_connector_metadata(metadata.storage)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.memory.clear_connector_metadata()
        self.storage.clear_connector_metadata()

    def register_caches(self, encoder_cache: dict[str, torch.Tensor], device: torch.device) -> None:
        super().register_caches(encoder_cache, device)
        self.memory.register_caches(encoder_cache, device)
        self.storage.register_caches(encoder_cache, device)

    def free_physical_cache(self) -> None:
        self.memory.free_physical_cache()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        plan = self._metadata
        assert isinstance(plan, TieredPlan)
        for item in plan.memory_loads.values():
            if not self.memory.load_item(item, encoder_cache):
                self.storage.load_item(item, encoder_cache)
        for key, item in plan.storage_loads.items():
            if self.storage.load_item(item, encoder_cache):
                self.memory.save_caches(encoder_cache, key)

    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        self.memory.save_caches(encoder_cache, mm_hash)
        self.storage.save_caches(encoder_cache, mm_hash)

    def wait_for_save(self) -> None:
        if not self._writes_back or self.memory.has_failed_saves or self._saves.owes:
            self.storage.wait_for_save()

    def get_finished(self) -> ECConnectorOutput:
        plan = self._metadata
        assert isinstance(plan, TieredPlan)
        in_memory, in_files = self.memory.get_finished(), self.storage.get_finished()
        output = self._saves.take_in(in_memory, in_files, plan.promotions)
        output.finished_recving = in_memory.finished_recving | in_files.finished_recving
        output.failed_recving = {
            key: f"{reason}; {in_memory.failed_recving[key]}" if key in in_memory.failed_recving else reason
            for key, reason in in_files.failed_recving.items()
        }
        output.tiers = {MEMORY: in_memory, STORAGE: in_files}
        return output

    def statistics(self) -> dict[str, TransferStats]:
        return self.memory.statistics() | self.storage.statistics()

    def shutdown(self) -> None:
        self.memory.shutdown()
        self.storage.shutdown()


@dataclass
class _Saves:
    """What became of each save so far, tier by tier."""

    waits_for_files: bool
    _memory: dict[str, str | None] = field(default_factory=dict)
    """None: saved. Otherwise why not."""
    _answered: set[str] = field(default_factory=set)

    @property
    def owes(self) -> bool:
        """Whether an answer waits for the files because memory has failed."""
        return any(reason is not None for reason in self._memory.values())

    def take_in(
        self, memory: ECConnectorOutput, files: ECConnectorOutput, promotions: set[str]
    ) -> ECConnectorOutput:
        """What can be answered now. A promotion is nobody's save."""
        output = ECConnectorOutput()
        for key in memory.finished_sending - promotions:
            self._memory[key] = None
            if not self.waits_for_files:
                output.finished_sending.add(key)
                self._answered.add(key)
        for key in memory.failed_sending.keys() - promotions:
            self._memory[key] = memory.failed_sending[key]
        for key in files.finished_sending | files.failed_sending.keys():
            in_memory = self._memory.pop(key, "it is not in memory")
            if key in self._answered:
                self._answered.discard(key)
            elif key in files.finished_sending or in_memory is None:
                output.finished_sending.add(key)
            else:
                output.failed_sending[key] = f"{files.failed_sending[key]}; {in_memory}"
        return output


def _tier(config: ECTransferConfig, name: str, extra: Mapping[str, Any], role: Any) -> ECTransferConfig:
    return dataclasses.replace(
        config,
        ec_connector=name,
        ec_role=role,
        ec_connector_extra_config=extra,
        ec_connector_module_path=None,
    )
