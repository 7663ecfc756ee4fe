"""Whole layers, called as transformers calls its own."""

from typing import Any

import torch
from torch import nn

from epd_engine.layers.attention import LanguageAttention, VisionAttention
from epd_engine.layers.gated_mlp import GatedMLP
from epd_engine.layers.rms_norm import RMSNorm


class DecoderLayer(nn.Module):
    """Such as Qwen2's."""

    def __init__(self, layer: Any):
        super().__init__()
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
        """`[rows, tokens, width]`; `batch` is for the attention function."""
        (turns,) = position_embeddings
        x = self.attention(
            self.attention_norm(hidden_states), hidden_states, turns, attention_mask, batch=batch
        )
        out: torch.Tensor = self.mlp(self.mlp_norm(x), x)
        return out


class VisionBlock(nn.Module):
    """Of Qwen2.5-VL's tower."""

    def __init__(self, block: Any):
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(block.norm1), RMSNorm(block.norm2)
        self.attention, self.mlp = VisionAttention(block.attn), GatedMLP(block.mlp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """`[patches, width]`, of which those between two neighbours of `cu_seqlens` attend to each other."""
        (turns,), lengths = position_embeddings, cu_seqlens.diff().tolist()
        x = self.attention(self.attention_norm(hidden_states), hidden_states, turns, lengths)
        out: torch.Tensor = self.mlp(self.mlp_norm(x), x)
        return out
