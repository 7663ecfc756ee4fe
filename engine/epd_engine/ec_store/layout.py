"""Where things lie in a store of files, and the few system calls that put and find them there. No torch.

    <root>/<namespace>/<mm_hash>/encoder_cache.safetensors      an entry
    <root>/<namespace>/<mm_hash>/.encoder_cache...tmp           a save in progress, or what is left of one
    <root>/<namespace>/.leases/                                 who reads what (`leases.py`)
    <root>/.janitor/, <root>/.quarantine/                       the janitor's

With an empty namespace the directories of keys lie in the root itself, as vLLM's file connector has them.
"""

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import header_length

ENTRY_NAME = "encoder_cache.safetensors"
JANITOR_DIRECTORY = ".janitor"
QUARANTINE_DIRECTORY = ".quarantine"
DIRECTORY_MODE = 0o2770  # setgid: entries of every pod belong to the volume's group
FILE_MODE = 0o660

# A file system that shows what another process did at once. On any other (NFS, a cluster's, unknown) what a
# look-up finds may be a moment old.
LOCAL_TYPES = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})

_HEADER_GUESS = 4096  # bytes; a header rarely needs a second read
_TEMPORARY = re.compile(re.escape(f".{ENTRY_NAME}.") + r".+\.tmp")


def temporary_name() -> str:
    """A name that no other call, process or node has."""
    return f".{ENTRY_NAME}.{os.getpid()}.{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def check_namespace(namespace: str) -> str:
    """The namespace itself if it is empty or one path component that is no bookkeeping, else ValueError."""
    if namespace.startswith(".") or "/" in namespace or "\0" in namespace:
        raise ValueError(f"namespace {namespace!r} must be one path component and not begin with a dot")
    return namespace


def make_directory(path: str | Path) -> bool:
    """Whether the directory had to be made. Its parent must exist."""
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    os.chmod(path, DIRECTORY_MODE)  # whatever the umask
    return True


def open_new(path: str) -> int:
    """A descriptor of a file that was not there before, to write, in the store's mode."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    os.fchmod(descriptor, FILE_MODE)  # whatever the umask
    return descriptor


def write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        done = os.writev(descriptor, left)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left:
            left[0] = left[0][done:]


def publish_text(path: Path, text: str) -> None:
    """Replaces a small bookkeeping file at once, for readers on any node."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = open_new(str(temporary))
    try:
        write_all(descriptor, [text.encode()])
        os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_start(descriptor: int) -> tuple[bytes, int]:
    """The file's first bytes, the whole header among them, and its length. Raises `EntryDamaged`."""
    file_bytes = os.fstat(descriptor).st_size
    start = os.pread(descriptor, _HEADER_GUESS, 0)
    needed = 8 + header_length(memoryview(start), file_bytes)
    if needed > len(start):
        start += os.pread(descriptor, needed - len(start), len(start))
    return start[:needed], file_bytes


def read_whole(descriptor: int, start: bytearray, payload: memoryview) -> int | None:
    """The file's length, where it is as long as header and payload; then `start` and `payload` are filled.

    None: it is something else, and what they hold is anything.
    """
    file_bytes = os.fstat(descriptor).st_size
    if file_bytes != len(start) + len(payload) or os.preadv(descriptor, [start, payload], 0) != file_bytes:
        return None
    return file_bytes if 8 + int.from_bytes(start[:8], "little") == len(start) else None


def read_into(descriptor: int, payload: memoryview, offset: int) -> None:
    """Fills `payload` from `offset` on. Raises `EntryDamaged` when the file ends before."""
    # Read, not mapped: it is one copy either way, and a file that shrinks or goes meanwhile is a short read
    # or an error here but a SIGBUS there.
    done = 0
    while done < len(payload):
        count = os.preadv(descriptor, [payload[done:]], offset + done)
        if not count:
            raise EntryDamaged(f"the payload ends after {done} of {len(payload)} bytes")
        done += count


def sync_directory(directory: str | Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refresh_directory(directory: str | Path) -> None:
    """Makes a network file system ask its server for the directory's state (close-to-open consistency).

    A cached "no such file" would last until the directory's attributes expire, half a minute by default.
    """
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return  # not there, or not any more
