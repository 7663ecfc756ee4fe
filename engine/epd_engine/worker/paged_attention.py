"""Attention over a paged KV cache, behind transformers' attention interface.

All tokens of a step are packed into one row without padding; each sequence attends to its own slots of the
pool (PagedAttention, arXiv 2309.06180). The model code stays transformers' own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "epd_paged"


class KVCache:
    """Keys and values of all layers: per layer two tensors `[num_slots, kv_heads, head_dim]`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_slots, kv_heads, head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]


@dataclass(frozen=True)
class PackedSequence:
    """One sequence's part of the packed row: queries `[begin, end)`, context slots `[context_len]` int64,
    the last `end - begin` of which are the queries' own."""

    begin: int
    end: int
    slots: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """A step's sequences, in the order in which their tokens are packed."""

    cache: KVCache
    sequences: list[PackedSequence]
    # Where each packed token's key and value go: `[num_tokens]` int64.
    write_slots: torch.Tensor


def slots_of(block_ids: list[int], block_size: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Slots `[num_tokens]` of a sequence's tokens, in order."""
    blocks = torch.tensor(block_ids, device=device)
    slots = blocks[:, None] * block_size + torch.arange(block_size, device=device)
    return slots.flatten()[:num_tokens]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    batch: PackedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature. `query` is `[1, heads, tokens, head_dim]`, `key` and `value` have
    kv heads; returns `[1, tokens, heads, head_dim]`."""
    keys, values = batch.cache.layers[module.layer_idx]  # type: ignore[index]
    keys[batch.write_slots] = key[0].transpose(0, 1)
    values[batch.write_slots] = value[0].transpose(0, 1)
    outputs = []
    for sequence in batch.sequences:
        q = query[:, :, sequence.begin : sequence.end]
        k = keys[sequence.slots].transpose(0, 1)[None]
        v = values[sequence.slots].transpose(0, 1)[None]
        mask, causal = _causal_mask(q.shape[2], k.shape[2], q.device)
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal_mask(queries: int, context: int, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """The mask of the context's last `queries` tokens: none for one token, SDPA's own for a whole prompt."""
    if queries == 1:
        return None, False
    if queries == context:
        return None, True
    return torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries), False


AttentionInterface.register(ATTENTION_NAME, paged_attention)
