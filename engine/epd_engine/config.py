"""Everything an instance is started with, checked and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from epd_engine.ec_transfer.config import ECTransferConfig
from epd_engine.kv_transfer.config import KVTransferConfig


@dataclass(frozen=True)
class MediaLimits:
    """Limits on what a client may send. Sizes in bytes, pixels and samples (over all channels), times in
    seconds."""

    per_request: Mapping[str, int] = field(default_factory=dict)
    allowed_domains: tuple[str, ...] = ()
    max_bytes: int = 32 << 20
    max_pixels: int = 64_000_000
    max_audio_seconds: float = 600.0
    max_audio_samples: int = 64_000_000
    fetch_timeout: float = 10.0
    workers: int = 4

    def limit(self, modality: str) -> int:
        return self.per_request.get(modality, 32)


@dataclass(frozen=True)
class EngineConfig:
    """`max_model_len` and `kv_cache_tokens` of None mean: what the model allows, and what the limits need
    or memory allows."""

    model: str
    revision: str | None = None
    served_model_names: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    block_size: int = 16
    kv_cache_tokens: int | None = None
    encoder_cache_size: int = 16384
    max_encoder_embeds: int = 4096
    ec_transfer: ECTransferConfig | None = None
    kv_transfer: KVTransferConfig | None = None
    ec_miss: Literal["error", "compute"] = "error"
    media: MediaLimits = field(default_factory=MediaLimits)

    @property
    def is_encode_only(self) -> bool:
        return self.ec_transfer is not None and self.ec_transfer.is_encode_only

    @property
    def has_tower(self) -> bool:
        """A pure consumer needs no tower unless it may compute what arrives raw; who takes prompts over from
        prefill instances needs none either."""
        if self.ec_transfer is None and self.kv_transfer is not None and not self.kv_transfer.is_producer:
            return False
        return self.ec_transfer is None or self.ec_transfer.is_producer or self.ec_miss == "compute"
