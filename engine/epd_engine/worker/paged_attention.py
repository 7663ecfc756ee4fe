"""Attention over a paged KV cache, behind transformers' attention interface.

All tokens of a step are packed into one row without padding; each sequence attends to its own blocks of the
pool (PagedAttention, arXiv 2309.06180). The model around it stays transformers'. Sequences with one new token
attend together, in groups of like length; the others one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from epd_engine.machine.device import has_products

ATTENTION_NAME = "epd_paged"
_SHORTEST_OF_A_GROUP = 0.75  # of its longest: what a group reads in vain stays below a quarter


class KVCache:
    """Keys and values of all layers: per layer two tensors `[num_blocks, kv_heads, block_size, head_dim]`.

    A head's tokens of one block lie together, so that gathering a context gives matrices in memory order.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size, self.kv_heads, self.device = block_size, kv_heads, device
        self.has_products = has_products(device, dtype)
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]


@dataclass(frozen=True)
class Span:
    """One sequence's part of a packed row: its tokens `[start, end)` lie from `begin` on. `is_wanted` says
    whether its last token's outcome is."""

    begin: int
    start: int
    end: int
    block_ids: Sequence[int]
    is_wanted: bool = True

    @property
    def last(self) -> int:
        """Where its last token lies."""
        return self.begin + self.end - self.start - 1


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
    added to their scores. `by_products` says in which of two ways they attend."""

    places: torch.Tensor | None
    rows: torch.Tensor
    mask: torch.Tensor
    by_products: bool


class PackedBatch:
    """A step's sequences over a cache; indices and masks are made once and serve every layer.

    `wanted` `[rows]` are the packed tokens whose outcome is, or None for all. The last layer may be asked by
    their queries alone: each attends like a decode over its context, in `finals`.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None):
        """`on_layer` is called with a layer's index when its new keys and values lie in the cache."""
        self.cache, self.on_layer = cache, on_layer
        num_tokens = sum(span.end - span.start for span in spans)
        self.write_rows = self._written(spans)
        decoding = [(span, span.begin) for span in spans if span.end - span.start == 1]
        self.prefills = [self._prefill(span) for span in spans if span.end - span.start > 1]
        self.decodes = self._decode_groups(decoding, num_tokens)
        wanted = [span for span in spans if span.is_wanted]
        self.wanted: torch.Tensor | None = None
        self.finals = self.decodes
        if len(wanted) < num_tokens:
            self.wanted = self._sent(torch.tensor([s.last for s in wanted], dtype=torch.int64))
            self.finals = self._decode_groups([(s, at) for at, s in enumerate(wanted)], len(wanted))

    def _blocks(self, span: Span) -> Sequence[int]:
        return span.block_ids[: -(-span.end // self.cache.block_size)]

    def _written(self, spans: Sequence[Span]) -> torch.Tensor:
        """Where keys and values of new tokens go, as rows of one head's token: `[tokens * kv_heads]`."""
        size, heads = self.cache.block_size, self.cache.kv_heads
        blocks = [span.block_ids[at // size] for span in spans for at in range(span.start, span.end)]
        offsets = [at % size for span in spans for at in range(span.start, span.end)]
        block, offset = torch.tensor([blocks, offsets])[..., None]
        rows: torch.Tensor = (block * heads + torch.arange(heads)) * size + offset
        return self._sent(rows.flatten())

    def _context_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of one head's block, head by head, for tables `[..., blocks]`: `[..., kv_heads, blocks]`."""
        heads = torch.arange(self.cache.kv_heads)
        return self._sent(table.unsqueeze(-2) * self.cache.kv_heads + heads[:, None])

    def _prefill(self, span: Span) -> _Prefill:
        length = span.end - span.start
        if span.start == 0:
            return _Prefill(span.begin, span.begin + length, span.end, None, None)
        mask = torch.ones(length, span.end, dtype=torch.bool, device=self.cache.device).tril(span.start)
        rows = self._context_rows(torch.tensor(self._blocks(span)))
        return _Prefill(span.begin, span.begin + length, span.end, rows, mask)

    def _decode_groups(self, queries: Sequence[tuple[Span, int]], count: int) -> list[_DecodeGroup]:
        """For the last tokens of spans, with where their queries lie among `count`."""
        lengths = [len(self._blocks(span)) for span, _ in queries]
        return [
            self._decode_group([queries[index] for index in group], count)
            for group in groups_of_like_length(lengths)
        ]

    def _decode_group(self, group: Sequence[tuple[Span, int]], count: int) -> _DecodeGroup:
        tables = [self._blocks(span) for span, _ in group]
        longest = max(map(len, tables))
        # Padded with a block of its own: nothing of another's ever meets its weights, not even as 0 x NaN.
        table = torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in tables])
        ends = torch.tensor([span.end for span, _ in group])
        beyond = torch.arange(longest * self.cache.block_size) >= ends[:, None]
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, float("-inf"))[:, None, None]
        places = None
        if len(group) < count:
            places = self._sent(torch.tensor([place for _, place in group]))
        return _DecodeGroup(places, self._context_rows(table), self._sent(mask), self.cache.has_products)

    def _sent(self, made: torch.Tensor) -> torch.Tensor:
        """To the cache's device, without waiting for what that is computing."""
        return made.to(self.cache.device, non_blocking=True)


def groups_of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of `lengths` in groups; in each they ascend, and no one is much shorter than the longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= _SHORTEST_OF_A_GROUP * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


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
    """transformers' attention signature. `query` is `[1, heads, rows, head_dim]`, of all tokens or of those
    that are wanted; `key` and `value` are of all, with kv heads. Returns `[1, rows, heads, head_dim]`."""
    keys, values = batch.cache.layers[module.layer_idx]  # type: ignore[index]
    head_dim = query.shape[-1]
    for cache, new in ((keys, key), (values, value)):
        cache.view(-1, head_dim).index_copy_(
            0, batch.write_rows, new[0].transpose(0, 1).reshape(-1, head_dim)
        )
    if batch.on_layer is not None:
        batch.on_layer(module.layer_idx)  # type: ignore[arg-type]
    queries = query[0].transpose(0, 1)
    is_final = len(queries) < key.shape[2]
    decodes = batch.finals if is_final else batch.decodes
    if decodes and decodes[0].places is None:
        return _decode(queries, keys, values, decodes[0], scaling)[None], None
    output = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    for part in () if is_final else batch.prefills:
        output[part.begin : part.stop] = _prefill(query, key, value, keys, values, part, scaling)
    for group in decodes:
        output[group.places] = _decode(queries[group.places], keys, values, group, scaling)
    return output[None], None


def _gather(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The context of `rows` `[..., kv_heads, blocks]`: `[..., kv_heads, blocks * block_size, head_dim]`."""
    size, head_dim = cache.shape[2:]
    picked = cache.view(-1, size * head_dim).index_select(0, rows.flatten())
    return picked.view(*rows.shape[:-1], rows.shape[-1] * size, head_dim)


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: _Prefill,
    scaling: float,
) -> torch.Tensor:
    """`[tokens, heads, head_dim]` of one sequence's many queries."""
    q = query[:, :, part.begin : part.stop]
    if part.rows is None:
        k, v = key[:, :, part.begin : part.stop], value[:, :, part.begin : part.stop]
    else:
        k = _gather(keys, part.rows)[None, :, : part.length]
        v = _gather(values, part.rows)[None, :, : part.length]
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


def _decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _DecodeGroup, scaling: float
) -> torch.Tensor:
    """`[sequences, heads, head_dim]` to the same, one query each: the heads that share a KV head are rows of
    one matrix, so that no key is repeated. On CPUs plain products are several times faster here than SDPA,
    but slower where they are no more than a loop of torch's."""
    sequences, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    q = q.reshape(sequences, kv_heads, heads // kv_heads, head_dim)
    k, v = _gather(keys, group.rows), _gather(values, group.rows)
    if group.by_products:
        weights = torch.softmax((q @ k.transpose(2, 3)).float() * scaling + group.mask, dim=-1)
        attended = weights.to(q.dtype) @ v
    else:
        attended = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scaling)
    return attended.reshape(sequences, heads, head_dim)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
