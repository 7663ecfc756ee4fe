"""glibc's memory allocator, told what an engine is like.

Each step allocates and frees the same tens of megabytes. By default they go back to the kernel, most of all
from the arenas of threads, and every page of them is asked for and zeroed again: a fifth of the time of a
tower that encodes several pictures at once.
"""

import ctypes

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

KEPT_BYTES = 512 << 20  # free memory at the end of the heap that is not given back
MAPPED_BYTES = 32 << 20  # larger allocations are mappings of their own; the most that glibc takes


def keep_freed_memory() -> None:
    """For the whole process, before it starts threads. Does nothing where there is no glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # one heap: what one thread frees, the next one uses
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def give_back_freed_memory() -> None:
    """Once, after what leaves gaps all over the heap, as loading weights does: no step would fill them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
