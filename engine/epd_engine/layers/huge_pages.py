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
HUGE_PAGE = 2 << 20  # bytes: what both x86-64 and AArch64 (with 4 KiB pages) call huge
_TRIES, _PAUSE_SECONDS = 10, 0.01  # while the kernel says that a page is in use elsewhere for the moment
_NEAR = 1 << 20  # ranges with no more between them become one: that is memory of ours, too


def use_huge_pages(modules: Iterable[nn.Module]) -> int:
    """Moves packed weights to huge pages where the kernel lets us; returns the bytes moved."""
    parts = [part for module in modules for part in module.modules()]
    memory = [part.memory for part in parts if isinstance(part, PackedLinear)]
    moved = HUGE_PAGE * collapse([page for begin, end in merged(memory) for page in whole_pages(begin, end)])
    log.debug("%d MB of weights lie on huge pages", moved >> 20)
    return moved


def merged(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges `[begin, end)` that cover (address, length), neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for address, length in sorted(memory):
        end = address + length
        if ranges and address - ranges[-1][1] <= _NEAR:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((address, end))
    return ranges


def whole_pages(begin: int, end: int) -> range:
    """Where the huge pages begin that lie in a range from end to end."""
    return range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE)


def collapse(pages: list[int]) -> int:
    """How many the kernel moved. Best effort: without such pages everything works as before.

    Each by itself: the kernel refuses a whole range for one page that is not mapped, as between two weights.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for _ in range(_TRIES):
        in_use = []
        for page in pages:
            madvise(page, HUGE_PAGE, mmap.MADV_HUGEPAGE)  # so that it stays one
            if not madvise(page, HUGE_PAGE, _MADV_COLLAPSE):
                moved += 1
            elif ctypes.get_errno() == errno.EAGAIN:
                in_use.append(page)
        if not in_use:
            break
        pages = in_use
        time.sleep(_PAUSE_SECONDS)
    return moved
