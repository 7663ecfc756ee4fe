"""The memory of this machine that a deployment's store may have: a directory of its own on a tmpfs."""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import LocalError

HOME = Path("/dev/shm")
_MOUNTS = Path("/proc/self/mountinfo")
_SHARE = 4


@dataclass(frozen=True)
class MemoryBudget:
    """What a store may take of the memory."""

    capacity: int
    """Bytes."""
    note: str
    """Why it is less than was asked for; empty where it is not."""


def memory_directory(run: Path, home: Path = HOME) -> Path:
    """Where a run has its memory. The hash keeps apart runs of one name in different state directories."""
    return home / f"epd-{run.name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def budget(asked: int | None, home: Path = HOME) -> MemoryBudget:
    """What was asked for, at most a quarter of what is free: a claim on a cluster is larger than a laptop.

    Raises LocalError where there is no tmpfs.
    """
    if not is_tmpfs(home, _MOUNTS.read_text()):
        raise LocalError(
            f"spec.ecStore.sharedMemory: needs a tmpfs at {home}, and there is none; mount one there, "
            "or use `sharedStorage: {}`"
        )
    found = os.statvfs(home)
    most = found.f_bavail * found.f_frsize // _SHARE
    if asked is not None and asked <= most:
        return MemoryBudget(asked, "")
    wanted = f", not {asked >> 20} MiB" if asked is not None else ""
    note = f"spec.ecStore.sharedMemory: takes {most >> 20} MiB{wanted}: a quarter of what is free in {home}"
    return MemoryBudget(most, note)


def is_tmpfs(path: Path, mounts: str) -> bool:
    """Whether a tmpfs is mounted at a path, by the text of a `mountinfo` file."""
    kinds = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(), after.split()
        if len(fields) > 4 and source and fields[4] == str(path):
            kinds.append(source[0])
    # The last mount lies on top of the others.
    return kinds[-1:] == ["tmpfs"]


def make_memory(directory: Path) -> None:
    """Makes the directory, for this user alone. Raises LocalError when it cannot be made."""
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise LocalError(
            f"spec.ecStore.sharedMemory: cannot make {directory} ({error.strerror}); "
            "take another name for the run with --name"
        ) from None


def remove_memory(directory: Path) -> None:
    """Removes a run's directory, if there is one. What another user put in its place is left alone."""
    try:
        is_ours = directory.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return
    if is_ours and directory.is_dir() and not directory.is_symlink():
        shutil.rmtree(directory)
