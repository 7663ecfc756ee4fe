"""A step's tokens in one packed row, each sequence over its own blocks of the pool (PagedAttention, arXiv
2309.06180), behind transformers' attention interface. The model around it stays transformers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from epd_engine.attention.base import Attention, Queries
from epd_engine.attention.kv_cache import KVCache, sent
from epd_engine.attention.sdpa import SdpaAttention

ATTENTION_NAME = "epd_paged"


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


class PackedBatch:
    """A step's sequences over a cache; what is made here serves every layer.

    `wanted` `[rows]` are the packed tokens whose outcome is, or None for all. The last layer may be asked by
    their queries alone: each attends like a decode over its context, in `finals`.
    """

    def __init__(
        self,
        cache: KVCache,
        spans: Sequence[Span],
        on_layer: Callable[[int], None] | None = None,
        kind: type[Attention] = SdpaAttention,
    ):
        """`on_layer` is called with a layer's index when its new keys and values lie in the cache."""
        self.cache, self.on_layer = cache, on_layer
        num_tokens = sum(span.end - span.start for span in spans)
        self.write_rows = self._written(spans)
        everyone = [Queries(s.begin, s.end - s.start, s.end, s.block_ids) for s in spans]
        self.attention = kind(cache, everyone, num_tokens, num_tokens)
        wanted = [span for span in spans if span.is_wanted]
        self.wanted: torch.Tensor | None = None
        self.finals = self.attention
        if len(wanted) < num_tokens:
            self.wanted = sent(torch.tensor([s.last for s in wanted], dtype=torch.int64), cache.device)
            last = [Queries(at, 1, s.end, s.block_ids) for at, s in enumerate(wanted)]
            self.finals = kind(cache, last, len(wanted), num_tokens)

    def _written(self, spans: Sequence[Span]) -> torch.Tensor:
        """Where keys and values of new tokens go, as rows of one head's token: `[tokens * kv_heads]`."""
        size = self.cache.block_size
        blocks = [span.block_ids[at // size] for span in spans for at in range(span.start, span.end)]
        offsets = [at % size for span in spans for at in range(span.start, span.end)]
        return sent(self.cache.token_rows(*torch.tensor([blocks, offsets])).flatten(), self.cache.device)


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
    cached = batch.cache.layers[module.layer_idx]  # type: ignore[index]
    head_dim = query.shape[-1]
    new = key[0].transpose(0, 1), value[0].transpose(0, 1)
    for cache, tokens in zip(cached, new, strict=True):
        cache.view(-1, head_dim).index_copy_(0, batch.write_rows, tokens.reshape(-1, head_dim))
    if batch.on_layer is not None:
        batch.on_layer(module.layer_idx)  # type: ignore[arg-type]
    queries = query[0].transpose(0, 1)
    attend = batch.finals if len(queries) < key.shape[2] else batch.attention
    return attend(queries, new, cached, scaling)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
