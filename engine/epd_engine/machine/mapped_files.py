"""Files in memory: what has been read of them and is not needed any more."""

import ctypes
import logging
from collections.abc import Iterable
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_MADV_DONTNEED = 4  # Python's own `madvise` wants the mapping's object, which is another library's


def forget_pages(paths: Iterable[Path]) -> int:
    """Gives back the pages of files that this process has mapped; returns the bytes. Best effort.

    Whoever reads them again gets them from the page cache. Mappings in which anything was changed are left
    alone: the change would be lost.
    """
    try:
        return _forget({str(path.resolve()) for path in paths})
    except (psutil.Error, OSError, ValueError, AttributeError) as error:  # /proc is not the same everywhere
        log.info("pages of files that are not needed any more stay in memory: %s", error)
        return 0


def _forget(files: set[str]) -> int:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    forgotten = 0
    for mapping in psutil.Process().memory_maps(grouped=False):
        if mapping.path in files and not mapping.anonymous and not mapping.swap:
            begin, end = (int(address, 16) for address in mapping.addr.split("-"))
            if not madvise(begin, end - begin, _MADV_DONTNEED):
                forgotten += mapping.rss
    log.debug("%d MB of files were given back", forgotten >> 20)
    return forgotten
