"""What lies in a store, by looking. Nothing here changes anything."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import PlainHeader, parse_header
from epd_engine.ec_store.layout import ENTRY_NAME, is_temporary, read_start

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Seen:
    """An entry's file: its bytes, and when it was last used, in ns of the file system's clock."""

    bytes: int
    used: int


@dataclass(frozen=True)
class Leftover:
    """A temporary file in an entry's directory."""

    path: str
    bytes: int
    changed: float


def namespaces(root: Path) -> list[str]:
    """Namespaces with a directory in the store, the empty one (keys in the root) first. Raises OSError."""
    with os.scandir(root) as found:
        named = [
            entry.name
            for entry in found
            if not entry.name.startswith(".")
            and _KEY.fullmatch(entry.name) is None
            and entry.is_dir(follow_symlinks=False)
        ]
    return ["", *sorted(named)]


def is_open(base: Path) -> bool:
    """Whether this process may list what is in `base`."""
    return os.access(base, os.R_OK | os.X_OK, effective_ids=True)


def check_open(base: Path) -> None:
    """Raises PermissionError where `base` is there and closed to this process."""
    if not is_open(base) and base.exists():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(base))


def is_ours(base: Path) -> bool:
    """Whether `base` belongs to our user or one of our groups, however closed it is. Raises OSError."""
    status = os.stat(base)
    return status.st_uid == os.geteuid() or status.st_gid in (os.getegid(), *os.getgroups())


def keys(base: Path) -> Iterator[str]:
    """Names in `base` that can be an entry's directory. Raises OSError."""
    with os.scandir(base) as found:
        for entry in found:
            if _KEY.fullmatch(entry.name):
                yield entry.name


def look(base: Path, key: str) -> Seen | None:
    """The entry's file, None where there is none. Raises OSError for anything else."""
    try:
        status = os.stat(f"{base}/{key}/{ENTRY_NAME}", follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Seen(status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def leftovers(base: Path, key: str) -> list[Leftover] | None:
    """Temporary files in an entry's directory; None where there is no such directory."""
    found = []
    try:
        with os.scandir(f"{base}/{key}") as files:
            for file in files:
                if is_temporary(file.name):
                    status = file.stat(follow_symlinks=False)
                    found.append(Leftover(file.path, status.st_size, status.st_mtime))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found


def read_header(path: Path | str) -> PlainHeader:
    """The header of an entry's file, another program's included. Raises `EntryDamaged` or OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise EntryDamaged("not a file")
        start, file_bytes = read_start(descriptor)
        return parse_header(memoryview(start), file_bytes, PlainHeader, foreign=True)[0]
    finally:
        os.close(descriptor)
