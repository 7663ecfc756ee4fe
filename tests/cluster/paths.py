"""Where the harness keeps things: a cache that outlives runs, and state that does not."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

CACHE_ROOT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epd"
"""Built binaries, unpacked tools, base images and wheels. Safe to delete at any time."""

STATE_ROOT = Path(tempfile.gettempdir()) / f"epd-clusters-{os.getuid()}"
"""One directory per cluster that runs. Named by the user, so that two users never share one."""


def state_root() -> Path:
    """The root of all states, made sure to be our own: its name can be guessed, and /tmp is everybody's."""
    STATE_ROOT.mkdir(mode=0o700, parents=True, exist_ok=True)
    if STATE_ROOT.is_symlink() or STATE_ROOT.stat().st_uid != os.getuid():
        raise PermissionError(f"{STATE_ROOT} belongs to somebody else")
    return STATE_ROOT


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that the kernel gives back when the process dies, however it dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached(directory: Path, build: Callable[[Path, Path], None]) -> Path:
    """A directory filled once by `build(out, work)`.

    It appears under its name only when complete, so a build that was killed is never taken for a
    finished one; what such a build left is removed by the next, which the lock makes the only one.
    """
    if directory.is_dir():
        return directory
    with locked(directory.with_name(f"{directory.name}.lock")):
        if directory.is_dir():
            return directory
        out = directory.with_name(f"{directory.name}.partial")
        work = directory.with_name(f"{directory.name}.work")
        for leftover in (out, work):
            shutil.rmtree(leftover, ignore_errors=True)
            leftover.mkdir(parents=True)
        try:
            build(out, work)
            out.rename(directory)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return directory
