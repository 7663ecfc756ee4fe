"""What a model family must answer. Everything else in the engine is the same for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from epd_engine.core.request import MediaItem
from epd_engine.models.checkpoint import Checkpoint


class MediaRefused(ValueError):
    """Media that this model cannot take; the message is for the client."""


@dataclass(frozen=True)
class ProcessedMedia:
    """The encoder's inputs for one item and what places its output in a prompt."""

    features: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any]
    num_embeds: int


@dataclass(frozen=True)
class KVShape:
    num_layers: int
    kv_heads: int
    head_dim: int


class ModelFamily(ABC):
    """One loaded checkpoint of a family. Weights come in only by `load_tower` and `load_language`.

    `modalities` are the kinds of media the family takes ("image", "audio"); `placeholders` the text that
    its chat template writes for one item of each, one placeholder token in it.
    """

    modalities: ClassVar[frozenset[str]]

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device

    # Sizes

    @property
    @abstractmethod
    def embed_width(self) -> int:
        """The width of one encoder output row."""

    @property
    @abstractmethod
    def kv_shape(self) -> KVShape: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @property
    @abstractmethod
    def tower_prefixes(self) -> tuple[str, ...]:
        """Checkpoint names of the tower and projector begin with one of these."""

    # Prompt

    @abstractmethod
    def placeholder_token(self, modality: str) -> int:
        """The token that stands for one item in the rendered chat, and is repeated per embedding."""

    @abstractmethod
    @abstractmethod
    def num_embeds(self, modality: str, metadata: Mapping[str, Any]) -> int:
        """Rows of the encoder's output for an item of which only metadata is at hand.

        Raises `MediaRefused` for metadata that is malformed or beyond any picture's bounds.
        """

    @abstractmethod
    def positions(self, num_tokens: int, media: Sequence[MediaItem]) -> tuple[torch.Tensor, int]:
        """Rotary positions `[axes, num_tokens]` int64 of an expanded prompt, and what follows' delta."""

    # Encoder

    @abstractmethod
    def load_tower(self) -> None:
        """Loads tower and projector, and reads no other tensor."""

    @abstractmethod
    def process_image(self, image: Any, options: Mapping[str, Any]) -> ProcessedMedia:
        """The encoder's inputs of one RGB PIL image. Raises `MediaRefused`."""

    @abstractmethod
    def encode(self, batch: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Encoder outputs `[num_embeds, width]`, one for each item's features."""

    # Language model

    @abstractmethod
    def load_language(self) -> None:
        """Loads the language model and its head, and reads no other tensor."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens]` to `[tokens, width]`."""

    @abstractmethod
    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, **attention: Any) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` of packed embeddings `[tokens, width]` at `[axes, tokens]`."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to `[rows, vocab]`."""

    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """What is loaded, for counting parameters."""
