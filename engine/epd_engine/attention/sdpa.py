"""Attention by torch's own functions: on CPUs, and wherever no better kernel works.

Sequences with one query attend together, in groups of like length; the others one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from epd_engine.attention.base import Attention, Queries
from epd_engine.attention.kv_cache import KV, KVCache, sent
from epd_engine.machine.device import has_products

_SHORTEST_OF_A_GROUP = 0.75  # of its longest: what a group reads in vain stays below a quarter


@dataclass(frozen=True)
class _Prefill:
    """Queries `[begin, stop)` over a context of `length` tokens; `rows` is None where they are all of it."""

    begin: int
    stop: int
    length: int
    rows: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _DecodeGroup:
    """Queries at `places` `[sequences]`, or all there are (None); `mask` `[sequences, 1, 1, context]` is
    added to their scores."""

    places: torch.Tensor | None
    rows: torch.Tensor
    mask: torch.Tensor


class SdpaAttention(Attention):
    def __init__(self, cache: KVCache, queries: Sequence[Queries], num_rows: int, num_new: int):
        self._cache, self._num_rows = cache, num_rows
        self._by_products = has_products(cache.device, cache.dtype)
        self._prefills = [self._prefill(one) for one in queries if one.count > 1]
        decodes = [one for one in queries if one.count == 1]
        lengths = [len(cache.blocks(one.block_ids, one.length)) for one in decodes]
        self._groups = [
            self._decode_group([decodes[index] for index in group])
            for group in groups_of_like_length(lengths)
        ]

    def __call__(self, query: torch.Tensor, new: KV, cached: KV, scaling: float) -> torch.Tensor:
        if self._groups and self._groups[0].places is None:
            return self._decode(query, cached, self._groups[0], scaling)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in self._prefills:
            output[part.begin : part.stop] = _attend(query, new, cached, part, scaling)
        for group in self._groups:
            output[group.places] = self._decode(query[group.places], cached, group, scaling)
        return output

    def _prefill(self, one: Queries) -> _Prefill:
        stop = one.begin + one.count
        if not one.has_context:
            return _Prefill(one.begin, stop, one.length, None, None)
        cache = self._cache
        mask = torch.ones(one.count, one.length, dtype=torch.bool, device=cache.device)
        rows = self._context_rows(torch.tensor(cache.blocks(one.block_ids, one.length)))
        return _Prefill(one.begin, stop, one.length, rows, mask.tril(one.length - one.count))

    def _decode_group(self, group: Sequence[Queries]) -> _DecodeGroup:
        cache = self._cache
        tables = [cache.blocks(one.block_ids, one.length) for one in group]
        longest = max(map(len, tables))
        # Padded with a block of its own: nothing of another's ever meets its weights, not even as 0 x NaN.
        table = torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in tables])
        ends = torch.tensor([one.length for one in group])
        beyond = torch.arange(longest * cache.block_size) >= ends[:, None]
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        places = None
        if len(group) < self._num_rows:
            places = sent(torch.tensor([one.begin for one in group]), cache.device)
        return _DecodeGroup(places, self._context_rows(table), sent(mask, cache.device))

    def _context_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of one head's block, head by head, for tables `[..., blocks]`: `[..., kv_heads, blocks]`."""
        heads = torch.arange(self._cache.kv_heads)
        return sent(table.unsqueeze(-2) * self._cache.kv_heads + heads[:, None], self._cache.device)

    def _decode(
        self,
        q: torch.Tensor,
        cached: KV,
        group: _DecodeGroup,
        scaling: float,
    ) -> torch.Tensor:
        """`[sequences, heads, head_dim]` to the same, one query each: the heads that share a KV head are rows
        of one matrix, so that no key is repeated. On CPUs plain products are several times faster here than
        SDPA, but slower where they are no more than a loop of torch's."""
        sequences, heads, head_dim = q.shape
        kv_heads = self._cache.kv_heads
        q = q.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
        k, v = (_gather(tensor, group.rows) for tensor in cached)
        if self._by_products:
            weights = torch.softmax((q @ k.transpose(2, 3)).float() * scaling + group.mask, dim=-1)
            attended = weights.to(q.dtype) @ v
        else:
            attended = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
        return attended.reshape(sequences, heads, head_dim)


def _attend(
    query: torch.Tensor,
    new: KV,
    cached: KV,
    part: _Prefill,
    scaling: float,
) -> torch.Tensor:
    """`[tokens, heads, head_dim]` of one sequence's many queries."""
    q = query[part.begin : part.stop].transpose(0, 1)[None]
    if part.rows is None:
        k, v = (tensor[part.begin : part.stop].transpose(0, 1)[None] for tensor in new)
    else:
        k, v = (_gather(tensor, part.rows)[None, :, : part.length] for tensor in cached)
    attended = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1)


def _gather(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The context of `rows` `[..., kv_heads, blocks]`: `[..., kv_heads, blocks * block_size, head_dim]`."""
    size, head_dim = cache.shape[2:]
    picked = cache.view(-1, size * head_dim).index_select(0, rows.flatten())
    return picked.view(*rows.shape[:-1], rows.shape[-1] * size, head_dim)


def groups_of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in groups; in each they ascend, and no one is much shorter than the longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _SHORTEST_OF_A_GROUP * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]
