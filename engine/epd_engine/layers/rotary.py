"""Rotary positions (RoFormer, arXiv 2104.09864) as what they are: a turn of complex numbers.

transformers pairs dimension `i` of a head with `i + head_dim / 2`. Here the two of a pair lie side by side,
so that a whole head is turned by one product: the rows of the projections to queries and keys are put into
that order once (`pairs_side_by_side`). Their dot products are the same in any order.
"""

from typing import Any

import torch
from torch import nn


class Turns(nn.Module):
    """In place of a rotary embedding's cosines and sines: one tuple of one tensor, complex64
    `[..., head_dim / 2]`."""

    def __init__(self, embedding: Any):
        super().__init__()
        self._embedding = embedding

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor]:
        cos, sin = self._embedding(x.new_empty(0, dtype=torch.float32), position_ids)
        half = cos.shape[-1] // 2  # the other half repeats it
        return (torch.complex(cos[..., :half].float(), sin[..., :half].float()),)


def turn(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """`[..., tokens, heads, head_dim]` by `turns` `[..., tokens, head_dim / 2]`, computed in float32."""
    exact = heads.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    turned = torch.view_as_complex(exact.view(*heads.shape[:-1], -1, 2)).mul_(turns.unsqueeze(-2))
    return torch.view_as_real(turned).flatten(-2).to(heads.dtype)


def pairs_side_by_side(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows `[heads * head_dim, ...]` of a projection's weight or bias in the order that `turn` wants."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
