"""A FlashAttention kernel for CPUs, by the book and slowly: what torch's `varlen_attn` calls, and has on GPUs
alone. It shows that the right thing is asked of a kernel, not what a GPU's answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

OPERATOR = "_flash_attention_forward"


@contextmanager
def cpu_kernel(kernel: Any = None) -> Iterator[list[str]]:
    """While it lasts `kernel`, or one that is right, is what this process has for CPUs. Gives the forms in
    which it was called: "paged" or "packed", and "causal" or "full"."""
    calls: list[str] = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        calls.append(
            f"{'paged' if options.get('block_table') is not None else 'packed'} "
            f"{'causal' if arguments[8] else 'full'}"
        )
        attended = (kernel or attention)(*arguments, **options)
        nothing = torch.empty(0)
        return attended, nothing, nothing, nothing, nothing

    library = torch.library.Library("aten", "IMPL")
    library.impl(OPERATOR, recorded, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    sees: Callable[[int, int], torch.Tensor] | None = None,
    **_: Any,
) -> torch.Tensor:
    """With the refusals that the real ones have. `sees` makes another mask `[queries, keys]`, for one that
    errs."""
    assert query.dim() == 3
    assert query.shape[-1] % 8 == 0
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert (window_size_left, window_size_right) == ((-1, 0) if is_causal else (-1, -1))
    assert cum_seq_q.dtype is torch.int32
    begins = cum_seq_q.tolist()
    assert (begins[0], begins[-1], dropout_p) == (0, len(query), 0)
    assert scale is not None
    contexts = (
        _pages(key, value, seqused_k, block_table) if cum_seq_k is None else _parts(key, value, cum_seq_k)
    )
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for (begin, end), (k, v) in zip(pairwise(begins), contexts, strict=True):
        length, longest = end - begin, len(k)
        assert 0 < length <= max_q
        assert longest <= max_k
        seen = torch.ones(length, longest, dtype=torch.bool)
        if is_causal:  # the last query sees all
            seen = seen.tril(longest - length) if sees is None else sees(length, longest).bool()
        q = query[begin:end].float()
        k, v = (t.float().repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        output[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(output.dtype)
    return output


Contexts = list[tuple[torch.Tensor, torch.Tensor]]


def _parts(key: torch.Tensor, value: torch.Tensor, cum_seq_k: torch.Tensor) -> Contexts:
    assert cum_seq_k.dtype is torch.int32
    begins = cum_seq_k.tolist()
    assert (begins[0], begins[-1]) == (0, len(key))
    return [(key[a:b], value[a:b]) for a, b in pairwise(begins)]


def _pages(
    key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor | None, table: torch.Tensor | None
) -> Contexts:
    assert lengths is not None
    assert table is not None
    assert lengths.dtype is table.dtype is torch.int32
    return [
        (key[row.long()].flatten(0, 1)[:length], value[row.long()].flatten(0, 1)[:length])
        for row, length in zip(table, lengths.tolist(), strict=True)
    ]
