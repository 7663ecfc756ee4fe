"""The EC connector's contract: a scheduler side and a worker side joined by per-step metadata.

After vLLM's `ECConnectorBase` (vllm#25233). The scheduler side decides, the worker side moves tensors; the
metadata that the scheduler side builds for one step is all that the worker side learns. One connector
object plays one side.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.config import ECTransferConfig

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request


class ECConnectorRole(Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass(frozen=True)
class ECModelIdentity:
    """What makes entries of this model its own: fingerprint, embedding width, and dtype."""

    fingerprint: str
    width: int
    dtype: torch.dtype

    def expectation(self, item: "MediaItem") -> Expectation:
        """What an entry of `item` must be to be used."""
        return Expectation(self.fingerprint, item.num_embeds, self.width, self.dtype, item.metadata)


class ECConnectorMetadata:
    """What one step's worker side has to do; each connector has its own subclass."""

    @property
    def has_work(self) -> bool:
        """Whether the worker side must run even in a step that schedules nothing."""
        return False


@dataclass
class ECConnectorOutput:
    """What the worker side did since the last step, by mm_hash. Failures carry a reason for people.

    `finished_sending`: published, so that any reader finds it. `acknowledged`: loaded by a reader, once for
    each load. `tiers`: the same for each part of a composed connector.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_sending: dict[str, str] = field(default_factory=dict)
    failed_recving: dict[str, str] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    tiers: dict[str, "ECConnectorOutput"] = field(default_factory=dict)

    def merge(self, other: "ECConnectorOutput") -> None:
        """Takes in what `other` says."""
        self.finished_sending |= other.finished_sending
        self.finished_recving |= other.finished_recving
        self.failed_sending |= other.failed_sending
        self.failed_recving |= other.failed_recving
        self.acknowledged += other.acknowledged
        self.tiers |= other.tiers


class ECConnectorBase(ABC):
    """One side of a connector. Methods of the other side must not be called."""

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity):
        """Raises `ECConfigError` for an extra config that this connector does not understand."""
        self.config, self.role, self.identity = config, role, identity
        self._metadata: ECConnectorMetadata | None = None

    # Scheduler side

    @abstractmethod
    def has_cache_item(self, item: "MediaItem") -> bool:
        """Whether the store holds a usable entry for `item`. No side effects; called once per item and
        request, when the item is about to be needed. A producer is strict (the payload is read against
        its checksum), since its yes ends a primer; a consumer's yes may still fail at load."""

    @abstractmethod
    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        """Item `index` has its room in the encoder cache: plan its load from the store, or (`load` false:
        it is computed here, or lies here already) its save where this instance is a producer."""

    @abstractmethod
    def build_connector_meta(self) -> ECConnectorMetadata:
        """This step's plan; the connector's own state starts anew for the next step."""

    def is_published(self, item: "MediaItem") -> bool:
        """Whether a reader finds a usable entry for `item`, by its header alone; takes no lease."""
        raise NotImplementedError

    def refusal(self, item: "MediaItem") -> str | None:
        """Why `item` could never be published by this instance, if so."""
        return None

    def ensure_cache_available(self, request: "Request", index: int) -> bool:
        """Before item `index` is encoded: room in the store for what will be published. False: not yet."""
        return True

    def acknowledge(self, item: "MediaItem") -> None:  # noqa: B027
        """A request for which `item` was published does without a load: its producer may let go of it."""

    def update_connector_output(self, output: ECConnectorOutput) -> None:  # noqa: B027
        """Takes in what the worker side did."""

    def settle(self, items: Sequence["MediaItem"]) -> ECConnectorOutput:
        """In place of `update_connector_output`, where no reports come from the worker side: what became of
        the saves of `items`, which are over, is found out from the store."""
        raise NotImplementedError

    def request_finished(self, request: "Request") -> tuple[bool, Mapping[str, Any] | None]:
        """Whether a send still runs in the background, and what the answer tells the client.

        For a producer that is the primer answer: `{mm_hash: {"item_indices", "metadata"}}`.
        """
        if not self.config.is_producer:
            return False, None
        params: dict[str, Any] = {}
        for index, item in enumerate(request.media):
            entry = params.setdefault(item.mm_hash, {"item_indices": [], "metadata": dict(item.metadata)})
            entry["item_indices"].append(index)
        return False, params

    # Worker side

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def register_caches(self, encoder_cache: dict[str, torch.Tensor], device: torch.device) -> None:
        """Called once: the cache that loads fill, and the device its tensors live on."""
        self._device = device

    def free_physical_cache(self) -> None:  # noqa: B027
        """Frees what the step's metadata names, before anything is loaded or saved."""

    @abstractmethod
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Puts the step's external items into `encoder_cache` as `[num_embeds, width]`. Never raises for
        an item: what fails is reported by `get_finished` and absent from the cache."""

    @abstractmethod
    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        """Begins to publish one item of the step's plan; waits only where too much is being saved already.
        Never raises for an item, as above."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Returns once every save that has begun is durable and visible, or has failed."""

    @abstractmethod
    def get_finished(self) -> ECConnectorOutput:
        """What was done since the last call."""

    def statistics(self) -> Mapping[str, TransferStats]:
        """What this side has moved since start, by tier of the store."""
        return {}

    def shutdown(self) -> None:  # noqa: B027
        """Releases what the connector holds."""
