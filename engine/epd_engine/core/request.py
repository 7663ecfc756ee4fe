"""A request as the scheduler sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from epd_engine.core.remote_kv import RemoteKV
from epd_engine.core.sampling import SamplingParams


class RequestError(Exception):
    """Why a request cannot be served; ends that request alone.

    `status` is the HTTP status, `code` the machine-readable reason, `param` the field at fault if any.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"  # its KV is on the way from another instance
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class MediaItem:
    """One occurrence of a picture or a sound in a prompt.

    `offset` is the index of its first placeholder token in the prompt, `num_embeds` how many there are,
    `metadata` what the model family needs to size and place it. `features` are the encoder's inputs, or
    None where only metadata arrived.
    """

    modality: str
    mm_hash: str
    num_embeds: int
    metadata: Mapping[str, Any]
    offset: int = 0
    features: Mapping[str, torch.Tensor] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.num_embeds

    def is_same_media(self, other: "MediaItem") -> bool:
        """Whether both occurrences say the same of what their key stands for."""
        return (self.mm_hash, self.num_embeds, self.metadata) == (
            other.mm_hash,
            other.num_embeds,
            other.metadata,
        )


@dataclass
class Request:
    """Mutable state of one request; owned by the scheduler's thread once added.

    `positions` is `[axes, num_prompt_tokens]` int64; a generated token at index i has position
    `i + position_delta` on every axis. `num_computed_tokens` counts tokens whose KV is in the cache.
    `cache_salt` keeps tenants' prefixes apart; a lower `priority` is served earlier.
    """

    request_id: str
    prompt_token_ids: list[int]
    positions: torch.Tensor
    position_delta: int
    media: list[MediaItem]
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    priority: int = 0
    kv: RemoteKV | None = None
    """What another instance computes of it, if any does."""
    arrival: int = 0
    """Its place among all that were ever added."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were taken over from others, once it has been admitted."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    is_begun: bool = False
    """Whether the first token, where it came from outside, has been told."""
    # The store is probed once per medium: the answer, by mm_hash.
    in_store: dict[str, bool] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    """Media of which the store hears, or has heard, that this request needs nothing more from it."""

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served earlier and preempted later."""
        return self.priority, self.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids `[start, end)` over prompt and output."""
        prompt, output = self.num_prompt_tokens, self.output_token_ids
        return self.prompt_token_ids[start:end] + output[max(0, start - prompt) : max(0, end - prompt)]

    def position_ids(self, start: int, end: int) -> torch.Tensor:
        """Positions `[axes, end - start]` of tokens `[start, end)`."""
        known = self.positions[:, start:end]
        missing = end - start - known.shape[1]
        if missing == 0:
            return known
        tail = torch.arange(end - missing, end) + self.position_delta
        return torch.cat([known, tail.expand(known.shape[0], -1)], dim=1)

    def media_in(self, start: int, end: int) -> list[int]:
        """Indices of items with a placeholder in tokens `[start, end)`, in order."""
        return [i for i, item in enumerate(self.media) if item.offset < end and item.end > start]
