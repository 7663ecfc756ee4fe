"""What every kind of attention over the paged KV cache has to say."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epd_engine.attention.kv_cache import KV, KVCache


@dataclass(frozen=True)
class Queries:
    """The last `count` tokens of a sequence of `length`, whose KV is in `block_ids`; they lie in rows
    `[begin, begin + count)`."""

    begin: int
    count: int
    length: int
    block_ids: Sequence[int]

    @property
    def has_context(self) -> bool:
        """Whether there are tokens before them."""
        return self.length > self.count


class Attention(ABC):
    """How `queries` attend to their sequences, in every layer of a step. Each token sees those before it
    and itself. Indices and masks are made once."""

    @abstractmethod
    def __init__(self, cache: KVCache, queries: Sequence[Queries], num_rows: int, num_new: int):
        """`queries` are `num_rows` together, in ascending order of `begin`, of a step that computes
        `num_new` tokens."""

    @abstractmethod
    def __call__(self, query: torch.Tensor, new: KV, cached: KV, scaling: float) -> torch.Tensor:
        """`query` `[num_rows, heads, head_dim]` to the same. `new` are keys and values of the step's tokens
        `[num_new, kv_heads, head_dim]`; `cached` are a layer's of the cache, where those lie already."""
