"""Leases: who is about to read which entry, and who has read it.

Every process that reads has one small file in `<base>/.leases/` that it alone writes. A row says "until
then, do not delete this key"; a ring of the last keys says "I have read these". A process that dies leaves
rows that expire by themselves, so that nobody has to notice its death.

A lease is a courtesy, not a lock: it keeps an entry from being deleted between a look-up and a load. Whoever
reads still checks what it got, so that a lease that is seen late costs a miss and never a wrong tensor.

What if a peer is slow, dead, restarted or lies? A slow reader's lease runs out, and its load may miss. A
dead one's rows expire and its file is swept. A restarted one has a new file. A torn or foreign file counts
as no lease. A full volume grants none: a file is there as a whole or not at all. Where the leases cannot be
listed nobody knows what is leased, so nothing may be deleted.
"""

import errno
import os
import secrets
import struct
import time
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from epd_engine.ec_store.mounts import NETWORK_TYPES, filesystem_type

DIRECTORY = ".leases"
ROWS = 4096  # what a producer may have published within one lease's time and nobody has read yet
RING = 1024
STALE_SECONDS = 3600.0  # a file that nobody has written to for so long, and without a live row, is swept

_MAGIC = b"EPDLEAS1"
_HEADER = struct.Struct("<8sQ")  # magic, keys ever acknowledged
_ROW = struct.Struct("<d32s")  # expiry in seconds of the wall clock (0: free), key
_ROWS = np.dtype([("expires", "<f8"), ("key", "V32")])
_ROWS_AT = 64
_RING_AT = _ROWS_AT + ROWS * _ROW.size
_FILE_BYTES = _RING_AT + RING * 32


@dataclass
class _Held:
    row: int
    expires: float
    count: int


class LeaseTable:
    """The leases of one reader. Not thread-safe.

    `base` is the directory whose entries are leased; the file appears with the first lease. On a base that
    cannot be written (a read-only mount) all leases are refused quietly.
    """

    def __init__(self, base: Path, seconds: float):
        """`seconds` is how long a lease lasts without being taken again."""
        self._base, self._directory, self.seconds = base, base / DIRECTORY, seconds
        self._held: dict[str, _Held] = {}
        self._free = list(range(ROWS - 1, -1, -1))
        self._acknowledged = 0
        self._descriptor: int | None = None
        self._path: Path | None = None

    def take(self, key: str) -> bool:
        """Leases `key` from now on, once more if it is leased already. False: not granted."""
        now = time.time()
        held = self._held.get(key)
        if held is None:
            self._drop_expired(now)
            if not self._free:
                return False
            held = _Held(self._free.pop(), 0.0, 0)
        elif held.expires <= now:
            held.count = 0
        held.expires, held.count = now + self.seconds, held.count + 1
        if not self._write(_ROWS_AT + held.row * _ROW.size, _ROW.pack(held.expires, bytes.fromhex(key))):
            self._free.append(held.row)
            self._held.pop(key, None)
            return False
        self._held[key] = held
        return True

    def release(self, key: str, *, read: bool) -> None:
        """Gives one lease of `key` back; `read` tells the writers that the entry has arrived."""
        if read:
            self.acknowledge(key)
        held = self._held.get(key)
        if held is None:
            return
        held.count -= 1
        if held.count <= 0:
            self._free_row(key)

    def holds(self, key: str) -> bool:
        """Whether this reader leases `key` now."""
        held = self._held.get(key)
        return held is not None and held.expires > time.time()

    def everyones(self) -> Container[str]:
        """Keys that any reader of this base leases now; all keys where that cannot be told."""
        try:
            return live_leases(self._base)
        except OSError:
            return _Everything()

    def close(self) -> None:
        """Gives everything back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if self._path is not None:
            _unlink(self._path)
        self._held.clear()

    def acknowledge(self, key: str) -> None:
        """Tells the writers that a reader needs the entry of `key` no more."""
        place = _RING_AT + (self._acknowledged % RING) * 32
        if self._write(place, bytes.fromhex(key)):
            self._acknowledged += 1
            self._write(0, _HEADER.pack(_MAGIC, self._acknowledged))

    def _drop_expired(self, now: float) -> None:
        for key in [key for key, held in self._held.items() if held.expires <= now]:
            self._free_row(key)

    def _free_row(self, key: str) -> None:
        row = self._held.pop(key).row
        self._free.append(row)
        self._write(_ROWS_AT + row * _ROW.size, _ROW.pack(0.0, bytes(32)))

    def _write(self, place: int, data: bytes) -> bool:
        try:
            if self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0:
                self._open()
            assert self._descriptor is not None
            _put(self._descriptor, data, place)
        except OSError:
            return False
        return True

    def _open(self) -> None:
        """A file of our own; made anew with all that is held if a sweep has taken it for a dead one's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o2770)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if filesystem_type(self._directory) in NETWORK_TYPES:
            flags |= os.O_SYNC  # other nodes see what has reached the server
        path = self._directory / secrets.token_hex(8)
        content = bytearray(_FILE_BYTES)
        _HEADER.pack_into(content, 0, _MAGIC, self._acknowledged)
        for key, held in self._held.items():
            _ROW.pack_into(content, _ROWS_AT + held.row * _ROW.size, held.expires, bytes.fromhex(key))
        descriptor = os.open(path, flags, 0o660)
        try:
            os.fchmod(descriptor, 0o660)
            _put(descriptor, content, 0)
        except OSError:
            os.close(descriptor)
            _unlink(path)
            raise
        self._descriptor, self._path = descriptor, path


class _Everything(Container[str]):
    def __contains__(self, key: object) -> bool:
        return True


def live_leases(base: Path) -> set[str]:
    """Keys of `base` that somebody leases now. Raises OSError where the leases cannot be listed."""
    now = time.time()
    found: set[str] = set()
    for path in _paths(base):
        content = _content(path)
        if content is not None:
            found.update(bytes(key).hex() for key in _live(content, now)["key"])
    return found


def sweep_leases(base: Path) -> int:
    """Deletes the files of readers that are gone, those that died before theirs was whole included; returns
    how many."""
    now = time.time()
    swept = 0
    try:
        paths = _paths(base)
    except OSError:
        return 0
    for path in paths:
        content = _content(path)
        if content is not None and len(_live(content, now)):
            continue
        try:
            if now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
                swept += 1
        except OSError:
            continue  # another sweeper was faster
    return swept


@dataclass
class Acknowledgements:
    """What readers have read since the last question."""

    base: Path
    _seen: dict[str, int] = field(default_factory=dict)

    def take(self) -> list[str]:
        """Keys acknowledged since the last call, one for each load. A reader that acknowledged more than
        `RING` since then is heard of in part; the leases on the rest run out."""
        keys, seen = [], {}
        try:
            paths = _paths(self.base)
        except OSError:
            return []
        for path in paths:
            content = _content(path)
            if content is None:
                continue
            _, total = _HEADER.unpack_from(content)
            seen[path.name] = total
            last = self._seen.get(path.name, 0)
            for index in range(max(last, total - RING), total):
                place = _RING_AT + (index % RING) * 32
                keys.append(content[place : place + 32].hex())
        self._seen = seen
        return keys


def _live(content: bytes, now: float) -> np.ndarray:
    """The rows that lease something."""
    rows = np.frombuffer(content, _ROWS, count=ROWS, offset=_ROWS_AT)
    return rows[rows["expires"] > now]


def _paths(base: Path) -> list[Path]:
    """The lease files of `base`. Raises OSError where they cannot be listed."""
    try:
        return [base / DIRECTORY / name for name in os.listdir(base / DIRECTORY)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _content(path: Path) -> bytes | None:
    """What a lease file says; None where it is not whole, gone, or not for us to read."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read(_FILE_BYTES) or b""
    except OSError:
        return None
    return content if len(content) == _FILE_BYTES and content.startswith(_MAGIC) else None


def _put(descriptor: int, data: bytes | bytearray, place: int) -> None:
    """Writes all of `data`. Raises OSError; what a full volume takes in part is an error too."""
    if os.pwrite(descriptor, data, place) != len(data):
        raise OSError(errno.ENOSPC, "not all of it was written")


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # it is swept once it is old
