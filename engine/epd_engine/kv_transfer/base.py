"""The KV connector's contract: a scheduler side and a worker side joined by per-step metadata.

After vLLM's `KVConnectorBase_V1`. As with the EC connector, one object plays one side, the scheduler side
decides, and the metadata it makes for a step is all that the worker side learns. Block ids are those of this
instance's pool.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from epd_engine.ec_store.statistics import TransferStats
from epd_engine.kv_transfer.config import KVTransferConfig

if TYPE_CHECKING:
    from epd_engine.attention.kv_cache import KVCache
    from epd_engine.core.output import SchedulerOutput
    from epd_engine.core.request import Request

LAYOUT = "layer,k/v,block,head,token,dim"


class KVConnectorRole(Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"


@dataclass(frozen=True)
class KVModelIdentity:
    """What two instances must agree on to exchange KV. `fingerprint` covers the language model's weights;
    `block_size` is in tokens."""

    fingerprint: str
    dtype: torch.dtype
    block_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def compatibility(self) -> dict[str, Any]:
        """The same as JSON values, the layout with it."""
        said = {**asdict(self), "dtype": str(self.dtype).removeprefix("torch."), "layout": LAYOUT}
        return {"model" if key == "fingerprint" else key: value for key, value in said.items()}

    def difference(self, other: Mapping[str, Any]) -> str | None:
        """The first thing in which another instance's `compatibility` differs, in words."""
        for key, ours in self.compatibility.items():
            if other.get(key) != ours:
                return f"{key.replace('_', ' ')} is {other.get(key)!r:.80} there and {ours!r} here"
        return None

    @property
    def layer_bytes_per_block(self) -> int:
        """Keys and values of one layer and one block."""
        return 2 * self.kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class KVConnectorMetadata:
    """What one step's worker side has to do; each connector has its own subclass."""

    @property
    def has_work(self) -> bool:
        """Whether the worker side must run even in a step that schedules nothing."""
        return False


@dataclass
class KVConnectorOutput:
    """What the worker side did since the last step, by request id. Failures carry a reason for people.

    `saving`: blocks before this index of a request's are being saved. `finished_sending`: all of a prompt's
    KV is where a consumer finds it, or has been pulled. `finished_recving`: it lies in this pool's blocks.
    `served_port`: where peers reach this instance, said once.
    """

    saving: dict[str, int] = field(default_factory=dict)
    finished_sending: set[str] = field(default_factory=set)
    failed_sending: dict[str, str] = field(default_factory=dict)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: dict[str, str] = field(default_factory=dict)
    served_port: int | None = None


class KVConnectorBase(ABC):
    """One side of a connector. Methods of the other side must not be called."""

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, identity: KVModelIdentity):
        """Raises `KVConfigError` for an extra config that this connector does not understand."""
        self.config, self.role, self.identity = config, role, identity
        self._metadata: KVConnectorMetadata | None = None
        self.on_progress: Callable[[], None] = lambda: None
        """Called, in any thread, when `get_finished` has news of what runs in the background."""

    # Scheduler side

    @abstractmethod
    def check_request(self, request: "Request") -> None:
        """Raises `RequestError` where the request's `kv` could never be honoured."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> int:
        """How many tokens beyond the computed ones can come from outside; no side effects. Less than what is
        missing of the prompt of a `RemotePrefill` is a miss."""

    @abstractmethod
    def update_state_after_alloc(self, request: "Request", num_external_tokens: int) -> None:
        """The request holds blocks for `num_external_tokens` beyond its computed ones: plan their load. The
        scheduler keeps those blocks until the worker side has reported, whatever becomes of the request."""

    def request_preempted(self, request: "Request") -> None:  # noqa: B027
        """A running request is about to lose its blocks, and will ask for its prompt's KV again. What is
        planned now runs before anyone else uses these blocks."""

    @abstractmethod
    def build_connector_meta(self, step: "SchedulerOutput") -> KVConnectorMetadata:
        """This step's plan; the connector's own state starts anew for the next step."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: B027
        """Takes in what the worker side did."""

    @abstractmethod
    def request_finished(self, request: "Request", *, completed: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended, well or not: whether its blocks must be kept until `finished_sending` or
        `failed_sending` names it, and what the answer tells a decode instance. Called once for a request;
        for one that is loading, after its load has ended."""

    @abstractmethod
    def discard(self, request_id: str) -> None:
        """Nobody will come for what `request_finished` has promised."""

    # Worker side

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def register_kv_caches(self, kv_cache: "KVCache") -> None:
        """Called once: the pool's tensors."""
        self._kv_cache = kv_cache

    @abstractmethod
    def start_load_kv(self) -> None:
        """Begins the step's loads, and drops what the step says. Returns at once and never raises for a
        request: `get_finished` reports."""

    def wait_for_layer_load(self, layer: int) -> None:  # noqa: B027
        """Before a layer is computed. Nothing to wait for where the scheduler runs a request only once its
        load is reported, as ours does."""

    @abstractmethod
    def save_kv_layer(self, layer: int, request_ids: frozenset[str]) -> None:
        """A layer's KV of this step is in the pool: begin to save it for those of the step's plan that are
        in `request_ids`, the requests that are being computed. Never raises for a request."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """The step's computation is over; returns once its blocks may change."""

    @abstractmethod
    def get_finished(self) -> KVConnectorOutput:
        """What was done since the last call; also called between steps."""

    def statistics(self) -> TransferStats:
        """What this side has moved since start."""
        return TransferStats()

    def shutdown(self) -> None:  # noqa: B027
        """Releases what the connector holds."""
