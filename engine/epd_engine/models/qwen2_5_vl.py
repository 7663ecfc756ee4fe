"""Qwen2.5-VL (arXiv 2502.13923): a windowed vision tower, one embedding per 2x2 patches, 3-axis rotary
positions. The modules are transformers' own; this file says how to make, feed and place them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextModel,
)

from epd_engine.core.request import MediaItem
from epd_engine.layers.fuse import fuse_vision
from epd_engine.layers.linear import linear_of
from epd_engine.models.base import Decoded, MediaRefused, ModelFamily, ProcessedMedia, refuse_unknown

MAX_GRID_SIDE = 1 << 14
MAX_PIXELS = 16384 * 28 * 28  # the most that the family's own processor ever asks for
PIXEL_OPTIONS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # to the names in `size`


class Qwen2_5_VL(ModelFamily):
    modalities = frozenset({"image"})
    config_class = Qwen2_5_VLConfig
    # Older checkpoints keep the tower at the top.
    tower_names: ClassVar = {"model.visual.": "", "visual.": ""}

    @property
    def _vision(self) -> Any:
        return self._config.vision_config

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
        return self.checkpoint.read_with(AutoImageProcessor, backend="pil")

    def process(self, modality: str, decoded: Decoded, options: Mapping[str, Any]) -> ProcessedMedia:
        size = self._image_size(options)
        try:
            out = self._image_processor(
                images=[decoded], return_tensors="pt", size=size, do_rescale=False, do_normalize=False
            )
        except (ValueError, TypeError) as error:  # such as an aspect ratio beyond the processor's limit
            raise MediaRefused(f"the image processor refuses this picture: {error}") from error
        grid = out["image_grid_thw"]
        metadata = {"image_grid_thw": grid[0].tolist()}
        return ProcessedMedia(
            {"pixel_values": self._normalised(out["pixel_values"]), "image_grid_thw": grid},
            metadata,
            self.num_embeds("image", metadata),
        )

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Patches `[patches, channels * values]` float32 as the tower wants them, changed in place: the
        processor's own way to it takes twice as long as all else that it does."""
        factor, offset = self._normalisation
        pixels.view(len(pixels), len(factor), -1).mul_(factor).add_(offset)
        return pixels.to(self.dtype)

    @cached_property
    def _normalisation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a channel's values are multiplied by, and what is added: `[channels, 1]` float32 each."""
        processor = self._image_processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        said = (
            [processor.image_mean, processor.image_std] if processor.do_normalize else [[0.0] * 3, [1.0] * 3]
        )
        mean, std = torch.tensor(said, dtype=torch.float64)
        return (factor / std)[:, None].float(), (-mean / std)[:, None].float()

    def blank(self, modality: str) -> Decoded:
        return Image.new("RGB", (64, 64))

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
        parts = [f["pixel_values"].to(self.device) for f in batch]
        pixels = parts[0] if len(parts) == 1 else torch.cat(parts)
        grids = torch.cat([f["image_grid_thw"] for f in batch]).to(self.device)
        rows = (grids.prod(-1) // self._vision.spatial_merge_size**2).tolist()
        # Clones, so that one item's entry in the cache does not keep the whole batch alive.
        return [part.clone() for part in self.tower(pixels, grid_thw=grids).pooler_output.split(rows)]

    # Modules

    def load_tower(self) -> None:
        super().load_tower()
        tower: Any = self.tower
        tower.patch_embed = _patch_projection(tower.patch_embed.proj)
        fuse_vision(tower)

    def _make_tower(self) -> nn.Module:
        tower: nn.Module = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            self._vision, attn_implementation="sdpa"
        )
        return tower

    def _make_text_model(self) -> nn.Module:
        model: nn.Module = Qwen2_5_VLTextModel(self._text)
        return model

    @property
    def _tied_head(self) -> bool:
        return bool(self._config.tie_word_embeddings or self._text.tie_word_embeddings)


def _patch_projection(convolution: nn.Conv3d) -> nn.Linear:
    """Pixels `[patches, values of a patch]` to the tower's width, as the convolution over single patches did.

    Where each input is as large as the kernel that is a matrix product; the CPU's convolution took a hundred
    times as long for it, a third of the whole tower's time.
    """
    return linear_of(convolution.weight.flatten(1))


def _read_grid(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    refuse_unknown(metadata, "image_grid_thw")
    grid = metadata.get("image_grid_thw")
    if (
        not isinstance(grid, list)
        or len(grid) != 3
        or not all(type(n) is int and 0 < n <= MAX_GRID_SIDE for n in grid)
    ):
        raise MediaRefused(f"image_grid_thw must be three integers from 1 to {MAX_GRID_SIDE}")
    return grid[0], grid[1], grid[2]
