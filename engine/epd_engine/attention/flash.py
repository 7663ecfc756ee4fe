"""Attention of a whole step in one call of a FlashAttention kernel (arXiv 2307.08691), through torch's own
interface to them (`torch.nn.attention.varlen`): sequences of any length side by side, without padding.

The kernels that torch brings want each context in one piece, so that contexts are gathered first. Those of
the packages `flash-attn-3` (Hopper) and `flash-attn-4` (Blackwell) read pages where they lie.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

from epd_engine.attention.base import Attention, Queries
from epd_engine.attention.kv_cache import KV, KVCache, sent

# Windows before and after, counted from the end of the context. One query a sequence needs none to be causal;
# torch's own kernel then takes all queries of a KV head at once, and splits long contexts.
CAUSAL, FULL = (-1, 0), (-1, -1)
PACKAGES = {9: "FA3", 10: "FA4"}  # by a GPU's major compute capability


@dataclass(frozen=True)
class _Where:
    """Contexts in one row that begin at `begins`, or of `lengths` in the pages of `table`; all int32."""

    begins: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    table: torch.Tensor | None = None


class _OneCall(Attention):
    """Queries of all sequences in one row; `_context` says where their keys and values are."""

    def __init__(self, cache: KVCache, queries: Sequence[Queries], num_rows: int, num_new: int):
        self._begins = cumulative([one.count for one in queries], cache.device)
        self._most = max((one.count for one in queries), default=0)
        self._longest = max((one.length for one in queries), default=0)

    def __call__(self, query: torch.Tensor, new: KV, cached: KV, scaling: float) -> torch.Tensor:
        if not len(query):
            return torch.empty_like(query)
        (keys, values), where = self._context(new, cached)
        attended = varlen_attn(
            query,
            keys,
            values,
            self._begins,
            where.begins,
            self._most,
            self._longest,
            scale=scaling,
            window_size=FULL if self._most == 1 else CAUSAL,
            enable_gqa=query.shape[1] != keys.shape[-2],
            seqused_k=where.lengths,
            block_table=where.table,
        )
        assert isinstance(attended, torch.Tensor), "nothing else was asked for"
        return attended

    @abstractmethod
    def _context(self, new: KV, cached: KV) -> tuple[KV, _Where]: ...


class FlashAttention(_OneCall):
    """Contexts gathered into one row, or the new tokens themselves where they are all there is."""

    def __init__(self, cache: KVCache, queries: Sequence[Queries], num_rows: int, num_new: int):
        super().__init__(cache, queries, num_rows, num_new)
        self._where = _Where(begins=cumulative([one.length for one in queries], cache.device))
        self._rows: torch.Tensor | None = None
        if num_rows < num_new or any(one.has_context for one in queries):
            self._rows = _context_rows(cache, queries)

    def _context(self, new: KV, cached: KV) -> tuple[KV, _Where]:
        if self._rows is None:
            return new, self._where
        keys, values = cached
        return (_gather(keys, self._rows), _gather(values, self._rows)), self._where


class PagedFlashAttention(_OneCall):
    """Pages read where they lie. `activate_package` comes first."""

    def __init__(self, cache: KVCache, queries: Sequence[Queries], num_rows: int, num_new: int):
        super().__init__(cache, queries, num_rows, num_new)
        tables = [cache.blocks(one.block_ids, one.length) for one in queries]
        width = max(map(len, tables), default=0)
        padded = [[*own, *[own[-1]] * (width - len(own))] for own in tables]
        table = torch.tensor(padded, dtype=torch.int32)
        lengths = torch.tensor([one.length for one in queries], dtype=torch.int32)
        self._where = _Where(lengths=sent(lengths, cache.device), table=sent(table, cache.device))

    def _context(self, new: KV, cached: KV) -> tuple[KV, _Where]:
        keys, values = cached
        # The kernels' own order of a page, as views: [num_blocks, block_size, kv_heads, head_dim].
        return (keys.transpose(1, 2), values.transpose(1, 2)), self._where


def activate_package(device: torch.device) -> None:
    """For the whole process. Raises whatever importing it raises, or `ValueError` on a GPU for which there is
    none."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in PACKAGES:
        raise ValueError(f"there is none for compute capability {major}.{minor}")
    activate_flash_attention_impl(PACKAGES[major])


def deactivate_package() -> None:
    """Back to torch's own kernels."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def cumulative(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where parts of `lengths` begin, and where the last one ends: int32 `[parts + 1]`."""
    return sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _context_rows(cache: KVCache, queries: Sequence[Queries]) -> torch.Tensor:
    """Of all tokens of all sequences, one after another: `[tokens * kv_heads]`. Only numbers of blocks are
    sent; they are spread out on the device, without waiting for it."""
    size, total = cache.block_size, sum(one.length for one in queries)
    tables = [cache.blocks(one.block_ids, one.length) for one in queries]
    first = [0, *accumulate(map(len, tables))]
    blocks = sent(
        torch.tensor([block for table in tables for block in table], dtype=torch.int64), cache.device
    )
    lengths, firsts, begins = sent(
        torch.tensor(
            [
                [one.length for one in queries],
                first[:-1],
                [0, *accumulate(one.length for one in queries)][:-1],
            ],
            dtype=torch.int64,
        ),
        cache.device,
    )
    place = torch.arange(total, device=cache.device)
    place -= torch.repeat_interleave(begins, lengths, output_size=total)
    at = torch.repeat_interleave(firsts, lengths, output_size=total) + place // size
    return cache.token_rows(blocks[at], place % size).flatten()


def _gather(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[tokens, kv_heads, head_dim]` of a tensor of the cache."""
    _, kv_heads, _, head_dim = tensor.shape
    return tensor.view(-1, head_dim).index_select(0, rows).view(-1, kv_heads, head_dim)
