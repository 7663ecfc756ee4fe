"""Qwen2-Audio (arXiv 2407.10759): a Whisper-like tower over up to 30 seconds' spectrogram, one embedding per
40 ms, plain rotary positions. The modules are transformers' own; this file says how to make and feed them."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import AutoFeatureExtractor, Qwen2AudioConfig, Qwen2Model
from transformers.models.qwen2_audio.modeling_qwen2_audio import (
    Qwen2AudioEncoder,
    Qwen2AudioMultiModalProjector,
)

from epd_engine.models.audio import Waveform, resample
from epd_engine.models.base import Decoded, MediaRefused, ModelFamily, ProcessedMedia, refuse_unknown
from epd_engine.models.checkpoint import CheckpointError

TOKENS = "audio_num_tokens"
POOL = 2  # the tower's output has one row for two of its positions
FEWEST_FRAMES = 3  # less make no embedding


class Qwen2Audio(ModelFamily):
    modalities = frozenset({"audio"})
    config_class = Qwen2AudioConfig
    # Older checkpoints keep both at the top.
    tower_names: ClassVar = {
        "model.audio_tower.": "encoder.",
        "audio_tower.": "encoder.",
        "model.multi_modal_projector.": "projector.",
        "multi_modal_projector.": "projector.",
    }

    # Prompt

    def placeholder_token(self, modality: str) -> int:
        return int({"audio": self._config.audio_token_id}[modality])

    def num_embeds(self, modality: str, metadata: Mapping[str, Any]) -> int:
        refuse_unknown(metadata, TOKENS)
        count, most = metadata.get(TOKENS), self._config.audio_config.max_source_positions // POOL
        if type(count) is not int or not 1 <= count <= most:
            raise MediaRefused(f"{TOKENS} must be an integer from 1 to {most}")
        return count

    # Encoder

    @cached_property
    def _extractor(self) -> Any:
        """Raises `CheckpointError` where the spectrogram would not have the length that the tower expects."""
        extractor = self.checkpoint.read_with(AutoFeatureExtractor)
        positions = self._config.audio_config.max_source_positions
        if extractor.nb_max_frames != 2 * positions:
            raise CheckpointError(
                f"the feature extractor makes {extractor.nb_max_frames} frames of {extractor.chunk_length} "
                f"seconds, but a tower of {positions} positions takes {2 * positions}"
            )
        return extractor

    def process(self, modality: str, decoded: Decoded, options: Mapping[str, Any]) -> ProcessedMedia:
        assert isinstance(decoded, Waveform)
        if options:
            raise MediaRefused(
                f"mm_processor_kwargs: {next(iter(options))!r} is not known; none are for audio"
            )
        self._check_length(decoded)
        out = self._extractor(
            resample(decoded, self._extractor.sampling_rate),
            sampling_rate=self._extractor.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        if not bool(torch.isfinite(out["input_features"]).all()):
            raise MediaRefused("the sound's samples are too large for a spectrogram; they belong in [-1, 1]")
        frames = int(out["attention_mask"].sum())
        metadata = {TOKENS: _tokens(frames)}
        # The rest is padding, of which the last positions see no more than this.
        spectrum = out["input_features"][..., : 2 * _positions(frames) + 1].clone()
        features = {"input_features": spectrum, "num_frames": torch.tensor(frames)}
        return ProcessedMedia(features, metadata, self.num_embeds("audio", metadata))

    def _check_length(self, sound: Waveform) -> None:
        """transformers would cut a long sound off, and make no embedding of a very short one."""
        extractor = self._extractor
        length, rate = sound.length_at(extractor.sampling_rate), extractor.sampling_rate
        least = (FEWEST_FRAMES - 1) * extractor.hop_length + 1
        if length > extractor.n_samples:
            most = extractor.chunk_length
            raise MediaRefused(f"the sound lasts {sound.seconds:.3f} seconds; the model takes at most {most}")
        if length < least:
            raise MediaRefused(
                f"the sound lasts {sound.seconds:.4f} seconds; the model needs at least {least / rate:.4f}"
            )

    def blank(self, modality: str) -> Decoded:
        rate = self._extractor.sampling_rate
        return Waveform(np.zeros(rate // 2, np.float32), rate)

    @torch.inference_mode()
    def encode(self, batch: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        frames = [int(f["num_frames"]) for f in batch]
        longest = max(f["input_features"].shape[-1] for f in batch)
        spectra = torch.cat([_padded(f["input_features"], longest) for f in batch])
        outputs = self.tower(spectra.to(self.device, self.dtype), [_positions(n) for n in frames])
        # Clones, so that one item's entry in the cache does not keep the whole batch alive.
        return [output[: _tokens(n)].clone() for output, n in zip(outputs, frames, strict=True)]

    # Modules

    def _make_tower(self) -> nn.Module:
        return _Tower(self._config)

    def _make_text_model(self) -> nn.Module:
        model: nn.Module = Qwen2Model(self._text)
        return model


class _Tower(nn.Module):
    """transformers' layers over as many positions as the longest sound of a batch has. Its own encoder runs
    over the model's full 30 seconds always, with the same outcome."""

    def __init__(self, config: Any):
        super().__init__()
        self.encoder: Any = Qwen2AudioEncoder._from_config(config.audio_config, attn_implementation="sdpa")
        self.projector = Qwen2AudioMultiModalProjector(config)

    def forward(self, spectra: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Spectra `[items, mel bins, frames]`, of each of which the first `positions[i]` of the encoder's
        positions are sound and the others padding, to `[items, tokens, width]`."""
        encoder, length = self.encoder, max(positions)
        hidden = nn.functional.gelu(encoder.conv1(spectra))
        hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)[:, :length]
        hidden = hidden + encoder.embed_positions.weight[:length]
        mask = _mask(positions, hidden.device)
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        pooled = encoder.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2)
        projected: torch.Tensor = self.projector(encoder.layer_norm(pooled))
        return projected


def _mask(positions: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Which positions `[items, 1, 1, positions]` are sound; None where all are."""
    length = max(positions)
    if min(positions) == length:
        return None
    ends = torch.tensor(positions, device=device)
    return (torch.arange(length, device=device) < ends[:, None])[:, None, None]


def _padded(spectrum: torch.Tensor, frames: int) -> torch.Tensor:
    return nn.functional.pad(spectrum, (0, frames - spectrum.shape[-1]))


def _positions(frames: int) -> int:
    """How many of the encoder's positions come from so many frames."""
    return (frames - 1) // 2 + 1


def _tokens(frames: int) -> int:
    return (_positions(frames) - POOL) // POOL + 1
