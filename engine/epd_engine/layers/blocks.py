"""Whole layers, called as transformers calls its own."""

from typing import Any

import torch
from torch import nn

from epd_engine.attention.segments import SegmentAttention
from epd_engine.layers.attention import LanguageAttention, VisionAttention
from epd_engine.layers.gated_mlp import GatedMLP
from epd_engine.layers.rms_norm import RMSNorm


class DecoderLayer(nn.Module):
    """Such as Qwen2's.

    The last one of a model goes on with those tokens alone whose outcome is wanted, the last of each
    sequence; of all others it needs no more than their keys and values.
    """

    def __init__(self, layer: Any, is_last: bool):
        super().__init__()
        self._is_last = is_last
        self.attention_norm, self.mlp_norm = (
            RMSNorm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.attention, self.mlp = LanguageAttention(layer.self_attn), GatedMLP(layer.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor],
        batch: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """`[rows, tokens, width]`; `batch` is for the attention function, and says what is wanted."""
        (turns,) = position_embeddings
        wanted = batch.wanted if self._is_last and batch is not None else None
        residual = hidden_states if wanted is None else hidden_states[:, wanted]
        x = self.attention(
            self.attention_norm(hidden_states), residual, turns, attention_mask, wanted, batch=batch
        )
        out: torch.Tensor = self.mlp(self.mlp_norm(x), x)
        return out


class VisionBlock(nn.Module):
    """Of Qwen2.5-VL's tower; patches attend by `attend`."""

    def __init__(self, block: Any, attend: SegmentAttention):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(block.norm1), RMSNorm(block.norm2)
        self.attention, self.mlp = VisionAttention(block.attn, attend), GatedMLP(block.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """`[patches, width]`, of which those between two neighbours of `cu_seqlens` attend to each other."""
        (turns,) = position_embeddings
        x = self.attention(self.attention_norm(hidden_states), hidden_states, turns, cu_seqlens)
        out: torch.Tensor = self.mlp(self.mlp_norm(x), x)
        return out
