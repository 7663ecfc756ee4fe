"""Which attention a device gets: the best that works there.

A kernel is tried at start, beside the same mathematics in float32. One that is not installed, refuses the
dtype or the shapes, or is wrong is not used, and the log says why.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from epd_engine.attention.base import Attention
from epd_engine.attention.flash import (
    FlashAttention,
    PagedFlashAttention,
    activate_package,
    cumulative,
    deactivate_package,
)
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.packed_batch import PackedBatch, Span
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.attention.segments import (
    SegmentAttention,
    efficient_segments,
    flash_segments,
    sdpa_segments,
)
from epd_engine.machine.device import check_alive

# Steps that are tried, as (start, end) of each sequence; longer than a tile of any kernel.
STEPS = (((0, 300), (0, 33)), ((0, 150), (500, 700), (680, 681), (40, 41)), ((900, 901), (7, 8)))
SEGMENTS = (64, 64, 400, 13)
TOLERANCE = 0.02  # of values around one, and of each value: some roundings of eight bits of mantissa

log = logging.getLogger(__name__)


def activate_kernels(device: torch.device) -> None:
    """Has torch use the package of kernels that is made for this GPU, where it is installed; before anything
    else here."""
    if device.type == "cuda":
        _works("a package of kernels", device, partial(activate_package, device))


def choose_attention(cache: KVCache, heads: int) -> type[Attention]:
    """For queries of so many `heads` over `cache`."""
    for kind in better_than_sdpa(cache.device):
        if _works(kind.__name__, cache.device, partial(try_attention, kind, cache, heads)):
            return kind
        deactivate_package()  # torch's own kernels are the next best
    return SdpaAttention


def better_than_sdpa(device: torch.device) -> list[type[Attention]]:
    """The best first."""
    return [PagedFlashAttention, FlashAttention] if device.type == "cuda" else []


def choose_segments(like: torch.Tensor, heads: int, head_dim: int) -> SegmentAttention:
    """For queries of the dtype and on the device of `like`."""
    if like.device.type != "cuda":
        return sdpa_segments
    trial = partial(try_segments, flash_segments, like, heads, head_dim)
    return flash_segments if _works(flash_segments.__name__, like.device, trial) else efficient_segments


def try_attention(kind: type[Attention], cache: KVCache, heads: int) -> None:
    """Raises what the kernel raises, and `ArithmeticError` where it gives something else than it should."""
    generator = torch.Generator().manual_seed(0)
    for step in STEPS:
        spans, num_blocks = _spans(step, cache.block_size)
        ours, exact = cache.like(num_blocks, cache.dtype), cache.like(num_blocks, torch.float32)
        for mine, other in zip(ours.layers[0], exact.layers[0], strict=True):
            other.copy_(mine.copy_(torch.randn(mine.shape, generator=generator)))
        shape = (spans[-1].last + 1, heads + 2 * cache.kv_heads, ours.layers[0][0].shape[-1])
        heads_of_all = torch.randn(shape, generator=generator).to(cache.device, cache.dtype)
        found = _attended(kind, ours, spans, heads_of_all)
        with sdpa_kernel(SDPBackend.MATH):
            wanted = _attended(SdpaAttention, exact, spans, heads_of_all.float())
        _compare(found, wanted)


def _spans(step: Sequence[tuple[int, int]], block_size: int) -> tuple[list[Span], int]:
    """Sequences whose blocks lie apart and in no order, and how many blocks there are."""
    lengths = [-(-end // block_size) for _, end in step]
    free = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    spans, begin = [], 0
    for (start, end), length in zip(step, lengths, strict=True):
        spans.append(Span(begin, start, end, [free.pop() for _ in range(length)]))
        begin += end - start
    return spans, sum(lengths)


def _attended(
    kind: type[Attention], cache: KVCache, spans: Sequence[Span], heads_of_all: torch.Tensor
) -> torch.Tensor:
    """By all queries, and by the last one of each span; `[tokens, heads]` are queries', keys' and values'."""
    batch = PackedBatch(cache, spans, kind=kind)
    query = heads_of_all[:, : -2 * cache.kv_heads]
    key, value = heads_of_all[:, -2 * cache.kv_heads :].chunk(2, dim=1)
    for tensor, tokens in zip(cache.layers[0], (key, value), strict=True):
        tensor.view(-1, query.shape[-1]).index_copy_(0, batch.write_rows, tokens.flatten(0, 1))
    scaling = query.shape[-1] ** -0.5
    attended = batch.attention(query, (key, value), cache.layers[0], scaling)
    if batch.wanted is None:
        return attended
    finals = batch.finals(query[batch.wanted], (key, value), cache.layers[0], scaling)
    return torch.cat([attended, finals])


def try_segments(attend: SegmentAttention, like: torch.Tensor, heads: int, head_dim: int) -> None:
    """Raises as `try_attention` does."""
    shape = (3, sum(SEGMENTS), heads, head_dim)
    query, key, value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
    begins, scaling = cumulative(SEGMENTS, like.device), head_dim**-0.5
    found = attend(query, key, value, begins, scaling)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = sdpa_segments(query.float(), key.float(), value.float(), begins, scaling)
    _compare(found, wanted)


def _compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    beyond = float(((found - wanted).abs() / (1 + wanted.abs())).max())
    if not beyond <= TOLERANCE:  # which NaN is not, either
        raise ArithmeticError(f"what it gives is off by {beyond:.3g}")


def _works(name: str, device: torch.device, trial: Callable[[], None]) -> bool:
    """Raises what a GPU raises that is of no use any more."""
    try:
        trial()
    except Exception as reason:  # noqa: BLE001 - of a package or a kernel: they share no class
        log.info("%s: not used: %s", name, reason)
        check_alive(device)
        return False
    log.info("%s: used", name)
    return True
