"""What passes between scheduler, runner and server in one step: schedule -> execute -> update."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd_engine.core.encoder_cache_manager import EncoderCacheMoves
from epd_engine.core.request import FinishReason, Request, RequestError
from epd_engine.core.sampling import TokenLogprobs
from epd_engine.ec_transfer.base import ECConnectorMetadata, ECConnectorOutput
from epd_engine.kv_transfer.base import KVConnectorMetadata, KVConnectorOutput


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, start + length)` of one request, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last known token, so that a new one can be sampled."""
        return self.end == self.request.num_tokens


@dataclass
class SchedulerOutput:
    """One step's plan. Media are named as (request, item index)."""

    chunks: list[Chunk] = field(default_factory=list)
    scheduled_encoder_inputs: list[tuple[Request, int]] = field(default_factory=list)
    external_load_encoder_input: list[tuple[Request, int]] = field(default_factory=list)
    # Resident already, but the store lacks them: a producer publishes them again.
    republish_encoder_input: list[tuple[Request, int]] = field(default_factory=list)
    encoder_cache_moves: EncoderCacheMoves = field(default_factory=EncoderCacheMoves)
    # Requests of an encode-only instance with items in this step or still being saved.
    encode_requests: list[Request] = field(default_factory=list)
    ec_connector_metadata: ECConnectorMetadata | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None
    # Prompt tokens that requests admitted in this step took over from others.
    cached_prompt_tokens: int = 0
    # Whether the step ends only when all saves have; an encoder with more to encode goes on meanwhile.
    wait_for_saves: bool = True

    @property
    def is_empty(self) -> bool:
        connectors = (self.ec_connector_metadata, self.kv_connector_metadata)
        upkeep = any(metadata is not None and metadata.has_work for metadata in connectors)
        media = self.scheduled_encoder_inputs or self.external_load_encoder_input
        return not (
            self.chunks or self.encode_requests or media or upkeep or not self.encoder_cache_moves.is_empty
        )

    def failed(self, reason: str) -> ECConnectorOutput:
        """What a connector must hear of a step that could not be executed."""
        return ECConnectorOutput(
            failed_sending={
                request.media[index].mm_hash: reason
                for request, index in self.scheduled_encoder_inputs + self.republish_encoder_input
            },
            failed_recving={
                request.media[index].mm_hash: reason for request, index in self.external_load_encoder_input
            },
        )


@dataclass
class ModelRunnerOutput:
    """What a step did. `skipped` are requests for which nothing was computed, and the media they lacked;
    `sample_problems` says why no token could be chosen as a request wants it."""

    sampled: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    sample_problems: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    encode_errors: dict[str, str] = field(default_factory=dict)
    ec_output: ECConnectorOutput = field(default_factory=ECConnectorOutput)
    kv_output: KVConnectorOutput = field(default_factory=KVConnectorOutput)


@dataclass(frozen=True)
class RequestUpdate:
    """News of one request for the server: new tokens, an end, or an error."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    ec_transfer_params: Mapping[str, Any] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each new token, where the request asks for them."""
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None
