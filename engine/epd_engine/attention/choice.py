"""Which attention a device gets: the best that works there.

A kernel is tried at start, on a few numbers, beside torch's plain attention. One that is not installed,
refuses the dtype or the shapes, or is wrong is not used, and the log says why.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from epd_engine.attention.base import Attention
from epd_engine.attention.flash import (
    FlashAttention,
    PagedFlashAttention,
    activate_paged,
    cumulative,
    deactivate_paged,
)
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.packed_batch import PackedBatch, Span
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.attention.segments import SegmentAttention, flash_segments, sdpa_segments

TOLERANCE = 0.03  # of values around one, in dtypes of eight bits of mantissa or more

log = logging.getLogger(__name__)


def choose_attention(cache: KVCache, heads: int) -> type[Attention]:
    """For queries of so many `heads` over `cache`."""
    for kind, prepare in better_than_sdpa(cache.device):
        with _reason_told(kind.__name__):
            prepare(cache.device)
            try_attention(kind, cache, heads)
            return kind
    return SdpaAttention


def better_than_sdpa(device: torch.device) -> list[tuple[type[Attention], Callable[[torch.device], None]]]:
    """The best first, each with what makes it ready."""
    if device.type != "cuda":
        return []
    return [(PagedFlashAttention, activate_paged), (FlashAttention, lambda _: deactivate_paged())]


def choose_segments(like: torch.Tensor, heads: int, head_dim: int) -> SegmentAttention:
    """For queries of the dtype and on the device of `like`."""
    if like.device.type == "cuda":
        with _reason_told(flash_segments.__name__):
            try_segments(flash_segments, like, heads, head_dim)
            return flash_segments
    return sdpa_segments


def try_attention(kind: type[Attention], cache: KVCache, heads: int) -> None:
    """Two prompts; then a prompt, the middle of one and a decode in one step. Raises what the kernel raises,
    and `ArithmeticError` where it gives something else than plain attention does."""
    size, head_dim = cache.block_size, cache.layers[0][0].shape[-1]
    small = KVCache(
        num_layers=1, num_blocks=9, block_size=size, kv_heads=cache.kv_heads, head_dim=head_dim,
        dtype=cache.dtype, device=cache.device,
    )  # fmt: skip
    for tensor in small.layers[0]:
        tensor.normal_()
    prompt, chunk = Span(0, 0, size + 1, [7, 2]), Span(size + 1, size - 1, 2 * size + 1, [5, 0, 8])
    decode = Span(2 * size + 3, 2 * size, 2 * size + 1, [3, 6, 1])
    for spans in ([prompt, replace(chunk, start=0, end=size + 2)], [prompt, chunk, decode]):
        query = small.layers[0][0].new_empty(spans[-1].last + 1, heads, head_dim).normal_()
        found = _attended(kind, small, spans, query)
        with sdpa_kernel(SDPBackend.MATH):
            plain = _attended(SdpaAttention, small, spans, query)
        _compare(found, plain)


def _attended(
    kind: type[Attention], cache: KVCache, spans: Sequence[Span], query: torch.Tensor
) -> torch.Tensor:
    """By all queries, and by the last one of each span. Keys and values of new tokens are queries, too."""
    batch = PackedBatch(cache, spans, kind=kind)
    new = (query[:, : cache.kv_heads],) * 2
    for tensor, tokens in zip(cache.layers[0], new, strict=True):
        tensor.view(-1, query.shape[-1]).index_copy_(0, batch.write_rows, tokens.flatten(0, 1))
    scaling = query.shape[-1] ** -0.5
    everything = batch.attention(query, new, cache.layers[0], scaling)
    return torch.cat([everything, batch.finals(query[batch.wanted], new, cache.layers[0], scaling)])


def try_segments(attend: SegmentAttention, like: torch.Tensor, heads: int, head_dim: int) -> None:
    """Two lengths in one row. Raises as `try_attention` does."""
    query, key, value = like.new_empty(3, 29, heads, head_dim).normal_()
    begins, scaling = cumulative([8, 8, 13], like.device), head_dim**-0.5
    found = attend(query, key, value, begins, scaling)
    with sdpa_kernel(SDPBackend.MATH):
        plain = sdpa_segments(query, key, value, begins, scaling)
    _compare(found, plain)


def _compare(found: torch.Tensor, plain: torch.Tensor) -> None:
    worst = float((found.float() - plain.float()).abs().max())
    if not worst <= TOLERANCE:  # which NaN is not, either
        raise ArithmeticError(f"it differs from plain attention by {worst:.3g}")


@contextmanager
def _reason_told(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as reason:  # noqa: BLE001 - of a package or a kernel: they share no class
        log.info("%s is not used: %s", name, reason)
