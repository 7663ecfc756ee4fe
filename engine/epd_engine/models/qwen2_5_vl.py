"""Qwen2.5-VL (arXiv 2502.13923): a windowed vision tower, one embedding per 2x2 patches, 3-axis rotary
positions. The modules are transformers' own; this file says how to load, feed and place them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoImageProcessor, Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextModel,
)

from epd_engine.core.request import MediaItem
from epd_engine.models.base import KVShape, MediaRefused, ModelFamily, ProcessedMedia
from epd_engine.models.checkpoint import Checkpoint, CheckpointError, empty_weights
from epd_engine.worker.paged_attention import ATTENTION_NAME

# Older checkpoints keep the tower at the top and the language model right under `model`.
TOWER_PREFIXES = ("model.visual.", "visual.")
LANGUAGE_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
MAX_GRID_SIDE = 1 << 14
MAX_PIXELS = 16384 * 28 * 28  # the most that the family's own processor ever asks for
PIXEL_OPTIONS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # to the names in `size`


class _Language(nn.Module):
    """The text model and its head; a tied head has no tensor of its own."""

    def __init__(self, config: Any, tied: bool):
        super().__init__()
        self.model = Qwen2_5_VLTextModel(config)
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Qwen2_5_VL(ModelFamily):
    modalities = frozenset({"image"})

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device):
        super().__init__(checkpoint, dtype, device)
        self._config = Qwen2_5_VLConfig.from_dict(checkpoint.config)
        self._text, self._vision = self._config.text_config, self._config.vision_config
        if "sliding_attention" in self._text.layer_types:
            raise CheckpointError("sliding-window attention (use_sliding_window) is not supported")
        self._tower: nn.Module | None = None
        self._language: _Language | None = None

    # Sizes

    @property
    def embed_width(self) -> int:
        return int(self._vision.out_hidden_size)

    @property
    def kv_shape(self) -> KVShape:
        head_dim = self._text.hidden_size // self._text.num_attention_heads
        return KVShape(self._text.num_hidden_layers, self._text.num_key_value_heads, head_dim)

    @property
    def max_model_len(self) -> int:
        return int(self._text.max_position_embeddings)

    @property
    def tower_prefixes(self) -> tuple[str, ...]:
        return TOWER_PREFIXES

    # Prompt

    def placeholder_token(self, modality: str) -> int:
        return int({"image": self._config.image_token_id}[modality])

    def num_embeds(self, modality: str, metadata: Mapping[str, Any]) -> int:
        t, h, w = _read_grid(metadata)
        merge = self._vision.spatial_merge_size
        if t != 1 or h % merge or w % merge:
            raise MediaRefused(f"image_grid_thw must be [1, h, w] with h and w multiples of {merge}")
        return int(h * w // merge**2)

    def positions(self, num_tokens: int, media: Sequence[MediaItem]) -> tuple[torch.Tensor, int]:
        """M-RoPE: text advances all three axes together; a picture spans a grid of rows and columns, and
        what follows starts past its longer side."""
        merge = self._vision.spatial_merge_size
        parts, done, position = [], 0, 0
        for item in media:
            text = item.offset - done
            parts.append((torch.arange(text) + position).expand(3, -1))
            position += text
            _, h, w = (n // s for n, s in zip(_read_grid(item.metadata), (1, merge, merge), strict=True))
            rows = torch.arange(h).repeat_interleave(w)
            columns = torch.arange(w).repeat(h)
            parts.append(torch.stack([torch.zeros_like(rows), rows, columns]) + position)
            position += max(h, w)
            done = item.end
        parts.append((torch.arange(num_tokens - done) + position).expand(3, -1))
        return torch.cat(parts, dim=1), position - done

    # Encoder

    @cached_property
    def _image_processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self.checkpoint.folder, backend="pil")

    def load_tower(self) -> None:
        with empty_weights():
            tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
                self._vision, attn_implementation="sdpa"
            )
        self.checkpoint.load_into(tower, _strip(TOWER_PREFIXES), self.dtype, self.device)
        self._tower = tower

    def process_image(self, image: Any, options: Mapping[str, Any]) -> ProcessedMedia:
        size = self._image_size(options)
        try:
            out = self._image_processor(images=[image], return_tensors="pt", size=size)
        except (ValueError, TypeError) as error:  # such as an aspect ratio beyond the processor's limit
            raise MediaRefused(f"the image processor refuses this picture: {error}") from error
        grid = out["image_grid_thw"]
        metadata = {"image_grid_thw": grid[0].tolist()}
        return ProcessedMedia(
            {"pixel_values": out["pixel_values"], "image_grid_thw": grid},
            metadata,
            self.num_embeds("image", metadata),
        )

    def _image_size(self, options: Mapping[str, Any]) -> dict[str, int]:
        """The processor's bounds in pixels, as a request may change them."""
        size = {name: int(self._image_processor.size[edge]) for name, edge in PIXEL_OPTIONS.items()}
        for name, value in options.items():
            if name not in PIXEL_OPTIONS:
                known = ", ".join(PIXEL_OPTIONS)
                raise MediaRefused(f"mm_processor_kwargs: {name!r} is not known; known are {known}")
            if type(value) is not int or not 1 <= value <= MAX_PIXELS:
                raise MediaRefused(f"mm_processor_kwargs: {name} must be an integer from 1 to {MAX_PIXELS}")
            size[name] = value
        if size["min_pixels"] > size["max_pixels"]:
            raise MediaRefused("mm_processor_kwargs: min_pixels exceeds max_pixels")
        return {edge: size[name] for name, edge in PIXEL_OPTIONS.items()}

    @torch.inference_mode()
    def encode(self, batch: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        assert self._tower is not None, "this role has no tower"
        pixels = torch.cat([f["pixel_values"] for f in batch]).to(self.device, self.dtype)
        grids = torch.cat([f["image_grid_thw"] for f in batch]).to(self.device)
        rows = (grids.prod(-1) // self._vision.spatial_merge_size**2).tolist()
        # Clones, so that one item's entry in the cache does not keep the whole batch alive.
        return [part.clone() for part in self._tower(pixels, grid_thw=grids).pooler_output.split(rows)]

    # Language model

    def load_language(self) -> None:
        tied = bool(self._config.tie_word_embeddings or self._text.tie_word_embeddings)
        with empty_weights():
            language = _Language(self._text, tied)
        self.checkpoint.load_into(language, _language_name, self.dtype, self.device)
        language.model.set_attn_implementation(ATTENTION_NAME)
        self._language = language

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._language is not None, "this role has no language model"
        embeds: torch.Tensor = self._language.model.embed_tokens(token_ids)
        return embeds

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, **attention: Any) -> torch.Tensor:
        assert self._language is not None, "this role has no language model"
        out = self._language.model(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None],
            attention_mask={"full_attention": None},  # the paged attention makes its own
            use_cache=False,
            **attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._language is not None, "this role has no language model"
        head = self._language.lm_head
        weight = self._language.model.embed_tokens.weight if head is None else head.weight
        return nn.functional.linear(hidden, weight)

    def modules(self) -> Sequence[nn.Module]:
        return [m for m in (self._tower, self._language) if m is not None]


def _read_grid(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    grid = metadata.get("image_grid_thw")
    if (
        not isinstance(grid, list)
        or len(grid) != 3
        or not all(type(n) is int and 0 < n <= MAX_GRID_SIDE for n in grid)
    ):
        raise MediaRefused(f"image_grid_thw must be three integers from 1 to {MAX_GRID_SIDE}")
    return grid[0], grid[1], grid[2]


def _strip(prefixes: tuple[str, ...]) -> Any:
    def rename(name: str) -> str | None:
        return next((name[len(p) :] for p in prefixes if name.startswith(p)), None)

    return rename


def _language_name(name: str) -> str | None:
    if name.startswith(TOWER_PREFIXES):
        return None
    if name in ("lm_head.weight", "language_model.lm_head.weight"):
        return "lm_head.weight"
    rest = _strip(LANGUAGE_PREFIXES)(name)
    return None if rest is None else f"model.{rest}"
