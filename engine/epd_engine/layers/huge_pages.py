"""Weights on huge pages: a decode step reads all of them once, and at 4 KiB a page the processor spends a
fifth of that time on finding pages and on starting its prefetching anew at the end of each."""

import ctypes
import errno
import logging
import mmap
import time
from collections.abc import Iterable

from torch import nn

from epd_engine.layers.packed_linear import PackedLinear

log = logging.getLogger(__name__)

_MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it
_TRIES, _PAUSE_SECONDS = 10, 0.01  # while the kernel says that a page is in use elsewhere for the moment
_NEAR = 1 << 20  # ranges with no more between them become one: that is memory of ours, too


def use_huge_pages(modules: Iterable[nn.Module]) -> int:
    """Moves packed weights to huge pages where the kernel lets us; returns the bytes moved."""
    parts = [part for module in modules for part in module.modules()]
    memory = [part.memory for part in parts if isinstance(part, PackedLinear)]
    moved = sum(end - begin for begin, end in merged(memory) if _collapse(begin, end))
    log.debug("%d MB of weights lie on huge pages", moved >> 20)
    return moved


def merged(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges `[begin, end)` of whole pages that cover (address, length), neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for address, length in sorted(memory):
        begin = address & -mmap.PAGESIZE
        end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        if ranges and begin - ranges[-1][1] <= _NEAR:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((begin, end))
    return ranges


def _collapse(begin: int, end: int) -> bool:
    """Best effort: without such pages, or where a kernel refuses, everything works as before."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    length = end - begin
    if madvise(begin, length, mmap.MADV_HUGEPAGE):
        return False
    for _ in range(_TRIES):
        if not madvise(begin, length, _MADV_COLLAPSE):
            return True
        if ctypes.get_errno() != errno.EAGAIN:
            return False
        time.sleep(_PAUSE_SECONDS)
    return False
