"""Where things lie in an arena. All numbers are little-endian; a page is 4096 bytes.

    page 0      the header
    ...         buckets: for each hash value the first slot, as its index + 1 (0: none)
    ...         slots of 128 bytes, one for each entry
    data_at     the entries' bytes: payload, then the text (JSON: modality and placeholder metadata)

The header's `epoch` is odd while the producer changes the index, and a slot's `generation` is odd while the
slot stands for no entry. Both only grow. A number of 8 aligned bytes is written and read in one piece.
"""

import struct
import threading
from dataclasses import dataclass
from functools import cached_property

MAGIC = b"EPDARENA"
VERSION = 1
PAGE = 4096

HEADER = struct.Struct("<8sIIIIQQQQ16s64s")
"""magic, version, slots, buckets, reserved, data_at, data_bytes, epoch, committed, id, fingerprint"""
EPOCH_WORD = 40 // 8
COMMITTED_WORD = 48 // 8

SLOT = struct.Struct("<QIIQQIIIBB2xd16s32s")
"""generation, next, reserved, offset, payload bytes, text bytes, rows, width, dtype, has a checksum, created,
checksum, key"""
SLOT_BYTES = 128
SLOT_WORDS = SLOT_BYTES // 8

MAX_TEXT_BYTES = 64 * 1024

_BYTES_A_SLOT = 32 * 1024
_MIN_SLOTS, _MAX_SLOTS = 64, 65536


@dataclass(frozen=True)
class Geometry:
    """The sizes of one arena. Bytes, unless said otherwise."""

    slots: int
    buckets: int
    data_bytes: int

    @classmethod
    def of(cls, data_bytes: int) -> "Geometry":
        """For `data_bytes` of entries: a slot for each 32 KiB, and two buckets a slot."""
        slots = min(_MAX_SLOTS, max(_MIN_SLOTS, data_bytes // _BYTES_A_SLOT))
        return cls(slots, 2 * slots, _pages(data_bytes))

    @cached_property
    def buckets_at(self) -> int:
        return PAGE

    @cached_property
    def slots_at(self) -> int:
        return PAGE + _pages(4 * self.buckets)

    @cached_property
    def data_at(self) -> int:
        return self.slots_at + _pages(SLOT_BYTES * self.slots)

    @cached_property
    def file_bytes(self) -> int:
        return self.data_at + self.data_bytes

    def bucket(self, key: bytes) -> int:
        """Keys are SHA-256 already, so any of their bytes are as good as a hash."""
        return int.from_bytes(key[:4], "little") % self.buckets


def _pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


_lock = threading.Lock()


def fence() -> None:
    """Keeps what stands before it before what stands after it, on processors that reorder memory too.

    Taking and giving back a lock does that; an interpreter offers nothing more direct.
    """
    with _lock:
        pass
