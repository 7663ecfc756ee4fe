"""What a model family must answer. Everything else in the engine is the same for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import nn

from epd_engine.attention.packed_batch import PackedBatch
from epd_engine.core.request import MediaItem
from epd_engine.layers.fuse import fuse_language
from epd_engine.machine.device import has_products
from epd_engine.models.audio import Waveform
from epd_engine.models.checkpoint import Checkpoint, CheckpointError, empty_weights
from epd_engine.models.language import LanguageModel, check_attention

# What a decoder of the server hands over: an RGB picture, or one channel of sound.
Decoded = Image.Image | Waveform

# Where checkpoints keep the language model and its head, as transformers wrote them over the years.
LANGUAGE_NAMES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "model.": "model.",
}


class MediaRefused(ValueError):
    """Media that this model cannot take; the message is for the client."""


def refuse_unknown(metadata: Mapping[str, Any], known: str) -> None:
    """Raises `MediaRefused` for metadata with more fields than `known`: they are hashed, stored and sent."""
    if unknown := sorted(set(metadata) - {known}):
        raise MediaRefused(f"{unknown[0]!r} is not known; what is stored is described by {known} alone")


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

    @property
    def values_per_token(self) -> int:
        """Numbers that all keys and values of one token are."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim


class ModelFamily(ABC):
    """One loaded checkpoint of a family. Weights come in only by `load_tower` and `load_language`.

    `modalities` are the kinds of media the family takes ("image", "audio"), `config_class` is transformers'
    class of its config. `tower_names` maps the prefixes under which checkpoints keep tower and projector to
    those of the module that `_make_tower` makes.
    """

    modalities: ClassVar[frozenset[str]]
    config_class: ClassVar[Any]
    tower_names: ClassVar[Mapping[str, str]]

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        """Raises `CheckpointError` for a config that cannot be run."""
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self._config = _read_config(checkpoint, self.config_class)
        self._text = self._config.get_text_config()
        check_attention(self._text)
        self._tower: nn.Module | None = None
        self._language: LanguageModel | None = None

    # What a family answers: the prompt

    @abstractmethod
    def placeholder_token(self, modality: str) -> int:
        """The token that stands for one item in the rendered chat, and is repeated per embedding."""

    @abstractmethod
    def num_embeds(self, modality: str, metadata: Mapping[str, Any]) -> int:
        """Rows of the encoder's output for an item of which only metadata is at hand.

        Raises `MediaRefused` for metadata that is malformed or beyond the bounds of any item.
        """

    def positions(self, num_tokens: int, media: Sequence[MediaItem]) -> tuple[torch.Tensor, int]:
        """Rotary positions `[axes, num_tokens]` int64 of an expanded prompt, and what follows' delta.

        One axis that counts tokens, unless a family knows better.
        """
        return torch.arange(num_tokens)[None], 0

    # What a family answers: the encoder

    @abstractmethod
    def process(self, modality: str, decoded: Decoded, options: Mapping[str, Any]) -> ProcessedMedia:
        """The encoder's inputs of one item; `options` are the request's. Raises `MediaRefused`."""

    @abstractmethod
    def blank(self, modality: str) -> Decoded:
        """A small item, to run once through the tower before there are clients."""

    @abstractmethod
    def encode(self, batch: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Encoder outputs `[num_embeds, width]`, one for each item's features, as if each were alone."""

    @abstractmethod
    def _make_tower(self) -> nn.Module:
        """Tower and projector; called where parameters take no memory."""

    @abstractmethod
    def _make_text_model(self) -> nn.Module:
        """The language model without its head; called where parameters take no memory."""

    @property
    def _tied_head(self) -> bool:
        """Whether the head has no weights but those of the token embedding."""
        return False

    # What follows from that

    @property
    def embed_width(self) -> int:
        """The width of one encoder output row: that of a token's embedding."""
        return int(self._text.hidden_size)

    @property
    def kv_shape(self) -> KVShape:
        text = self._text
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return KVShape(text.num_hidden_layers, text.num_key_value_heads, head_dim)

    @property
    def num_heads(self) -> int:
        """Of queries, in each layer of the language model."""
        return int(self._text.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self._text.vocab_size)

    @property
    def max_model_len(self) -> int:
        return int(self._text.max_position_embeddings)

    @property
    def tower_prefixes(self) -> tuple[str, ...]:
        """Checkpoint names of the tower and projector begin with one of these."""
        return tuple(self.tower_names)

    def weight_bytes(self, *, tower: bool, language: bool) -> int:
        """What the weights of these parts will take, from the headers of their files."""
        values = self.checkpoint.num_values(self._tower_name) if tower else 0
        if language:
            values += self.checkpoint.num_values(self._language_name)
            values += self.vocab_size * self.embed_width if self._tied_head else 0
        is_kept = has_products(self.device, self.dtype)  # or widened, by `PackedLinear`
        return values * (self.dtype if is_kept else torch.float32).itemsize

    def load_tower(self) -> None:
        """Loads tower and projector, and reads no other tensor. Raises `CheckpointError`."""
        with empty_weights():
            tower = self._make_tower()
        self.checkpoint.load_into(tower, self._tower_name, self.dtype, self.device)
        self._tower = tower

    def load_language(self) -> None:
        """Loads the language model and its head, and reads no other tensor. Raises `CheckpointError`."""
        with empty_weights():
            language = LanguageModel(self._make_text_model(), self._tied_head)
        self.checkpoint.load_into(language, self._language_name, self.dtype, self.device)
        fuse_language(language.model)
        language.give_head()
        self._language = language

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens]` to `[tokens, width]`."""
        return self.language.embed(token_ids)

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Hidden states `[rows, hidden]` of those packed embeddings `[tokens, width]` at `[axes, tokens]`
        whose outcome `batch` wants."""
        return self.language.hidden(embeds, positions, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to `[rows, vocab]`."""
        return self.language.logits(hidden)

    def modules(self) -> Sequence[nn.Module]:
        """What is loaded, for counting parameters."""
        return [m for m in (self._tower, self._language) if m is not None]

    @property
    def tower(self) -> nn.Module:
        assert self._tower is not None, "this role has no tower"
        return self._tower

    @property
    def language(self) -> LanguageModel:
        assert self._language is not None, "this role has no language model"
        return self._language

    def _tower_name(self, name: str) -> str | None:
        return _renamed(name, self.tower_names)

    def _language_name(self, name: str) -> str | None:
        return None if name.startswith(self.tower_prefixes) else _renamed(name, LANGUAGE_NAMES)


def _read_config(checkpoint: Checkpoint, config_class: Any) -> Any:
    try:
        return config_class.from_dict(checkpoint.config)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        path = checkpoint.folder / "config.json"
        raise CheckpointError(f"{path} is no {config_class.__name__}: {error}") from error


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    """The name with the first prefix that fits replaced; None where none does."""
    return next((new + name[len(old) :] for old, new in names.items() if name.startswith(old)), None)
