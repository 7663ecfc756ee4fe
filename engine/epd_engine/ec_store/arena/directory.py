"""The arenas of one directory, and which of them still have a producer."""

import fcntl
import os
import time
from pathlib import Path

from epd_engine.ec_store.leases import sweep_leases

SUFFIX = ".arena"
UNFINISHED = ".unfinished"
_SETTLED_NS = 50_000_000  # a directory's time moves in ticks: a younger one may hide a second change


class ArenaDirectory:
    """Watches a directory's list of arenas for the price of one `stat`."""

    def __init__(self, path: Path):
        self._path = path
        self._time_ns = -1
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Names of the arenas there now, ordered; none where the directory is not there."""
        try:
            time_ns = os.stat(self._path).st_mtime_ns
            if time_ns != self._time_ns or time.time_ns() - time_ns < _SETTLED_NS:
                self._names = tuple(sorted(n for n in os.listdir(self._path) if n.endswith(SUFFIX)))
                self._time_ns = time_ns
        except OSError:
            self._time_ns, self._names = -1, ()
        return self._names


def sweep(root: Path) -> list[str]:
    """Removes what dead processes left in `root` and the directories in it; returns the arenas removed.

    The lock of an arena is its producer's life; a tmpfs belongs to one node, where such locks can be trusted.
    """
    swept = []
    for directory in [root, *_directories(root)]:
        for name in _files(directory):
            if name.endswith((SUFFIX, UNFINISHED)) and _remove_if_dead(directory / name):
                swept.append(str(directory / name))
        sweep_leases(directory)
    return swept


def lock(descriptor: int) -> bool:
    """Takes the lock of an arena without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_dead(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not lock(descriptor):
            return False
        path.unlink(missing_ok=True)
    except OSError:
        return False  # not ours to remove
    finally:
        os.close(descriptor)
    return True


def _directories(root: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
