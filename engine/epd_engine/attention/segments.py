"""Attention within segments of one row, such as pictures or windows of a vision tower: every token sees all
of its own segment."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

# Query, key and value `[tokens, heads, head_dim]`, where segments begin (int32 `[segments + 1]`, the row's
# end last), scaling; to `[tokens, heads, head_dim]`.
SegmentAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def sdpa_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Neighbours of one length attend in one call."""
    attended = torch.empty_like(query)
    for begin, length, count in runs(lengths_of(begins)):
        end = begin + length * count
        q, k, v = (
            part[begin:end].view(count, length, *part.shape[1:]).transpose(1, 2)
            for part in (query, key, value)
        )
        apart = scaled_dot_product_attention(q, k, v, scale=scaling)
        attended[begin:end] = apart.transpose(1, 2).flatten(0, 1)
    return attended


def efficient_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, scaling: float
) -> torch.Tensor:
    """The same by none of the FlashAttention kernels, which a package may have replaced by what refuses."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return sdpa_segments(query, key, value, begins, scaling)


def flash_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begins: torch.Tensor, scaling: float
) -> torch.Tensor:
    """All of them in one call of a FlashAttention kernel."""
    longest = max(lengths_of(begins))
    attended = varlen_attn(query, key, value, begins, begins, longest, longest, scale=scaling)
    assert isinstance(attended, torch.Tensor), "nothing else was asked for"
    return attended


@lru_cache(maxsize=4)
def lengths_of(begins: torch.Tensor) -> tuple[int, ...]:
    """Of segments. Remembered by the tensor itself: all layers of a tower ask with the same one or two, and
    on a GPU the answer is waited for."""
    return tuple(begins.diff().tolist())


def runs(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours of one length as (begin, length, how many)."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for length in lengths:
        if found and found[-1][1] == length:
            begin, _, count = found[-1]
            found[-1] = (begin, length, count + 1)
        else:
            found.append((at, length, 1))
        at += length
    return found
