"""What every connector over an `ec_store` shares: plans by mm_hash, leases, and honest reports."""

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, StoreError
from epd_engine.ec_store.leases import Acknowledgements, LeaseTable
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECModelIdentity,
)
from epd_engine.ec_transfer.config import ECTransferConfig

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request

log = logging.getLogger(__name__)

_ACKNOWLEDGEMENTS_SECONDS = 0.1  # on a volume each question is a handful of round trips


@dataclass
class StorePlan(ECConnectorMetadata):
    """Items to load into, and to save from, the encoder cache in one step, by mm_hash."""

    loads: dict[str, "MediaItem"] = field(default_factory=dict)
    saves: dict[str, "MediaItem"] = field(default_factory=dict)
    """Taken out as they begin: what is left at the step's end was never encoded."""


class StoreConnector(ECConnectorBase):
    """One side of a connector over a store whose entries lie below `base`; `tier` is the store's kind.

    Leases belong to the scheduler side: one from the look-up of an item until its load has come back, and one
    of the producer's own from an item's publication until a reader has acknowledged it, which stands for
    the reader that is on its way.
    """

    tier: ClassVar[str]

    def __init__(
        self,
        config: ECTransferConfig,
        role: ECConnectorRole,
        identity: ECModelIdentity,
        *,
        base: Path,
        lease_seconds: float,
    ):
        super().__init__(config, role, identity)
        self.leases = LeaseTable(base, lease_seconds)
        self._acknowledgements = Acknowledgements(base) if config.is_producer else None
        self._asked = 0.0
        self.transfers = TransferStats()
        self._output = ECConnectorOutput()
        self._plan = self._new_plan()

    # Scheduler side

    def has_cache_item(self, item: "MediaItem") -> bool:
        try:
            self._probe(item, deep=self.config.is_encode_only)
        except EntryMissing:
            return False
        except EntryDamaged as error:
            log.warning("entry %s is not used: %s", item.mm_hash, error)
            return False
        except StoreError as error:
            log.error("%s", error)
            return False
        self.leases.take(item.mm_hash)
        return True

    def is_published(self, item: "MediaItem") -> bool:
        try:
            self._probe(item, deep=False)
        except StoreError:
            return False
        return True

    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        item = request.media[index]
        if load:
            self._plan.loads[item.mm_hash] = item
        elif self.config.is_producer:
            self._plan.saves[item.mm_hash] = item

    def acknowledge(self, item: "MediaItem") -> None:
        self.leases.acknowledge(item.mm_hash)

    def build_connector_meta(self) -> StorePlan:
        plan, self._plan = self._plan, self._new_plan()
        return plan

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        for key in output.finished_recving:
            self.leases.release(key, read=True)
        for key in output.failed_recving:
            self.leases.release(key, read=False)
        for key in output.acknowledged:
            self.leases.release(key, read=False)
        if self.config.is_encode_only:
            for key in output.finished_sending:
                self.leases.take(key)

    def settle(self, items: Sequence["MediaItem"]) -> ECConnectorOutput:
        output = ECConnectorOutput(acknowledged=self._take_acknowledgements())
        for item in items:
            if self.is_published(item):
                output.finished_sending.add(item.mm_hash)
            else:
                output.failed_sending[item.mm_hash] = "it is not in the store"
        self.update_connector_output(output)
        return output

    def _new_plan(self) -> StorePlan:
        return StorePlan()

    @abstractmethod
    def _probe(self, item: "MediaItem", *, deep: bool) -> None:
        """Raises `StoreError` where the store holds no usable entry for `item`; `deep`: the payload is read
        against its checksum too."""

    # Worker side

    @property
    def _bound(self) -> StorePlan:
        assert isinstance(self._metadata, StorePlan), "no metadata is bound for this step"
        return self._metadata

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        for item in self._bound.loads.values():
            self.load_item(item, encoder_cache)

    def load_item(self, item: "MediaItem", encoder_cache: dict[str, torch.Tensor]) -> bool:
        """Loads one item and keeps account of it; whether it is in the cache now."""
        begun = time.perf_counter()
        try:
            tensor = encoder_cache[item.mm_hash] = self._load(item)
        except StoreError as error:
            log.warning("entry %s cannot be loaded: %s", item.mm_hash, error)
            self._output.failed_recving[item.mm_hash] = str(error)
            return False
        self.transfers.loaded(tensor.nbytes, time.perf_counter() - begun)
        self._output.finished_recving.add(item.mm_hash)
        return True

    def statistics(self) -> dict[str, TransferStats]:
        return {self.tier: self.transfers}

    @property
    def has_failed_saves(self) -> bool:
        """Whether `get_finished` will report a save that failed."""
        return bool(self._output.failed_sending)

    def get_finished(self) -> ECConnectorOutput:
        output, self._output = self._output, ECConnectorOutput()
        for key in self._bound.saves:
            output.failed_sending[key] = "it was not encoded"
        output.acknowledged = self._take_acknowledgements()
        return output

    def shutdown(self) -> None:
        self.leases.close()

    def _take_acknowledgements(self) -> list[str]:
        now = time.monotonic()
        if self._acknowledgements is None or now - self._asked <= _ACKNOWLEDGEMENTS_SECONDS:
            return []
        self._asked = now
        return self._acknowledgements.take()

    @abstractmethod
    def _load(self, item: "MediaItem") -> torch.Tensor:
        """A tensor `[num_embeds, width]` on the registered device. Raises `StoreError`."""
