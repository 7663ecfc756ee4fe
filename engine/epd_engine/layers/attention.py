"""Attention with one projection for queries, keys and values, rotary positions by `turn`, and the residual
added where the outcome is made. `x` is what has been normalised, `residual` what has not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from epd_engine.attention.segments import SegmentAttention
from epd_engine.layers.linear import linear_of
from epd_engine.layers.packed_linear import add_linear
from epd_engine.layers.rotary import pairs_side_by_side, turn


class LanguageAttention(nn.Module):
    """Of a decoder layer such as Qwen2's; attends by the function that its config names by now."""

    def __init__(self, attention: Any):
        super().__init__()
        # What attention functions ask of a module.
        self.config, self.layer_idx, self.is_causal = attention.config, attention.layer_idx, True
        self.num_key_value_groups = attention.num_key_value_groups
        self._attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads, self._kv_heads, _ = (linear.out_features // self._head_dim for linear in linears)
        self.qkv_proj = _joined(linears, self._head_dim)
        self.o_proj = attention.o_proj

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        turns: torch.Tensor,
        mask: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`[rows, tokens, width]`; `wanted` tokens alone attend, where it is given, and `residual` is theirs.
        `options` are for the attention function."""
        heads = self.qkv_proj(x).view(*x.shape[:-1], -1, self._head_dim)
        turned = turn(heads[..., : -self._kv_heads, :], turns).transpose(1, 2)
        query, key = turned[:, : self._heads], turned[:, self._heads :]
        value = heads[..., -self._kv_heads :, :].transpose(1, 2)
        if wanted is not None:
            query = query[:, :, wanted]
        attended, _ = self._attend(self, query, key, value, mask, scaling=self._scaling, **options)
        return add_linear(residual, self.o_proj, attended.flatten(-2))


class VisionAttention(nn.Module):
    """Of a tower that packs all patches into one row, such as Qwen2.5-VL's: patches attend within their
    picture or window, by `attend`."""

    def __init__(self, attention: Any, attend: SegmentAttention):
        super().__init__()
        self._attend = attend
        self._head_dim, self._scaling = attention.head_dim, attention.scaling
        self.qkv = _reordered(attention.qkv, self._head_dim)
        self.proj = attention.proj

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, turns: torch.Tensor, begins: torch.Tensor
    ) -> torch.Tensor:
        """`[patches, width]`; pictures or windows begin at `begins`, the end of all last."""
        patches = len(x)
        heads = self.qkv(x).view(patches, 3, -1, self._head_dim)
        turned = turn(heads[:, :2].flatten(1, 2), turns).view(patches, 2, -1, self._head_dim)
        attended = self._attend(turned[:, 0], turned[:, 1], heads[:, 2], begins, self._scaling)
        return add_linear(residual, self.proj, attended.flatten(1))


def _joined(linears: Sequence[nn.Linear], head_dim: int) -> nn.Linear:
    """Projections to queries, keys and values as one, the first two in the order of `turn`."""
    query, key, value = linears
    weights = [pairs_side_by_side(one.weight, head_dim) for one in (query, key)] + [value.weight]
    biases = None
    if query.bias is not None:
        biases = [pairs_side_by_side(one.bias, head_dim) for one in (query, key)] + [value.bias]
    return linear_of(torch.cat(weights), None if biases is None else torch.cat(biases))


def _reordered(qkv: nn.Linear, head_dim: int) -> nn.Linear:
    """The same for a projection that is one already."""

    def reordered(rows: torch.Tensor) -> torch.Tensor:
        values = 2 * len(rows) // 3  # where they begin
        return torch.cat([pairs_side_by_side(rows[:values], head_dim), rows[values:]])

    return linear_of(reordered(qkv.weight), None if qkv.bias is None else reordered(qkv.bias))
