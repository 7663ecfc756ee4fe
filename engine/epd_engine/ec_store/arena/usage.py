"""How full the arenas of a directory are, without torch."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from epd_engine.ec_store.arena.layout import HEADER, MAGIC, SLOT_BYTES, VERSION, Geometry

_SLOTS = np.dtype(
    {
        "names": ["generation", "payload", "text"],
        "formats": ["<u8", "<u8", "<u4"],
        "offsets": [0, 24, 32],
        "itemsize": SLOT_BYTES,
    }
)


@dataclass(frozen=True)
class MemoryUsage:
    """Of all arenas together. `capacity` is what they may take, `committed` what they have taken; bytes."""

    bytes: int = 0
    entries: int = 0
    capacity: int = 0
    committed: int = 0
    arenas: int = 0


def memory_usage(root: Path) -> MemoryUsage:
    """Of the arenas in `root` and the directories in it; those that cannot be read are left out."""
    found = [
        usage
        for path in sorted(root.glob("*.arena")) + sorted(root.glob("*/*.arena"))
        if (usage := _of(path))
    ]
    return MemoryUsage(
        bytes=sum(one.bytes for one in found),
        entries=sum(one.entries for one in found),
        capacity=max((one.capacity for one in found), default=0),
        committed=sum(one.committed for one in found),
        arenas=len(found),
    )


def _of(path: Path) -> MemoryUsage | None:
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(HEADER.size) or b""
            if len(start) < HEADER.size or not start.startswith(MAGIC):
                return None
            _, version, slots, buckets, _, _, data_bytes, _, committed, _, _ = HEADER.unpack(start)
            geometry = Geometry(slots, buckets, data_bytes)
            if version != VERSION or geometry.file_bytes != os.fstat(file.fileno()).st_size:
                return None
            table = os.pread(file.fileno(), slots * SLOT_BYTES, geometry.slots_at)
    except OSError:
        return None
    rows = np.frombuffer(table, _SLOTS, count=len(table) // SLOT_BYTES)
    live = rows[(rows["generation"] != 0) & (rows["generation"] % 2 == 0)]
    taken = int(live["payload"].sum()) + int(live["text"].sum())
    return MemoryUsage(taken, len(live), data_bytes, committed, 1)
