"""The reader's side of an arena: find, copy out, look again."""

import json
import mmap
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from epd_engine.ec_store.arena.layout import (
    COMMITTED_WORD,
    EPOCH_WORD,
    HEADER,
    MAGIC,
    MAX_TEXT_BYTES,
    SLOT,
    SLOT_BYTES,
    SLOT_WORDS,
    VERSION,
    Geometry,
    fence,
)
from epd_engine.ec_store.arena.tensors import DTYPE_NAMES, DTYPES, digest
from epd_engine.ec_store.entry import EntryHeader
from epd_engine.ec_store.errors import EntryDamaged, StoreUnavailable

_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_TRIES = 20
_PAUSE_SECONDS = 0.0005
_MAX_KNOWN = 1024  # entries whose place is remembered between a look-up and a load


@dataclass(frozen=True)
class Located:
    """An entry as it was found; good for as long as `ArenaReader.is_current` says so."""

    slot_word: int
    generation: int
    header: EntryHeader
    tensor: torch.Tensor
    """`[num_embeds, width]`, in the arena itself: to be copied, never to be written."""
    checksum: bytes | None


class ArenaReader:
    """One arena, mapped for reading. Not thread-safe."""

    def __init__(self, path: Path):
        """Raises `EntryDamaged` for a file that is no arena of this version, `StoreUnavailable` if it cannot
        be opened."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailable(f"cannot open the arena {path}: {error.strerror}") from error
        try:
            self._geometry, self.fingerprint = _read_header(path, descriptor)
            self._map = mmap.mmap(descriptor, self._geometry.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written is what is wanted
            whole = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self._data = whole[self._geometry.data_at :]
        self._populated = 0
        self._known: dict[str, Located] = {}

    def find(self, key: str) -> Located | None:
        """The entry of `key`, if there is one. Raises `EntryDamaged` for one whose numbers are impossible."""
        known = self._known.get(key)
        if known is not None:
            if self.is_current(known):
                return known
            del self._known[key]
        raw = bytes.fromhex(key)
        for attempt in range(_TRIES):
            if attempt >= _TRIES // 2:
                time.sleep(_PAUSE_SECONDS)  # a producer that lost its processor in the midst of a change
            epoch = self._words[EPOCH_WORD]
            if epoch & 1:
                continue  # one that died there leaves an arena without entries
            fence()
            slot = self._walk(raw)
            try:
                located = None if slot is None else self._located(slot)
            except EntryDamaged:
                fence()
                if self._words[EPOCH_WORD] == epoch:
                    raise
                continue  # read while it changed
            fence()
            if self._words[EPOCH_WORD] != epoch:
                continue
            if located is not None:
                self._remember(key, located)
            return located
        return None

    def is_current(self, located: Located) -> bool:
        """Whether the entry is still the one that was found; asked after a copy, it covers the copy."""
        fence()
        return self._words[located.slot_word] == located.generation

    def _walk(self, key: bytes) -> int | None:
        geometry = self._geometry
        begin = geometry.buckets_at + 4 * geometry.bucket(key)
        slot = int.from_bytes(self._map[begin : begin + 4], "little")
        for _ in range(geometry.slots):
            if slot == 0 or slot > geometry.slots:
                return None
            begin = geometry.slots_at + (slot - 1) * SLOT_BYTES
            if self._map[begin + 72 : begin + 104] == key:
                return slot - 1
            slot = int.from_bytes(self._map[begin + 8 : begin + 12], "little")
        return None

    def _located(self, slot: int) -> Located | None:
        begin = self._geometry.slots_at + slot * SLOT_BYTES
        fields = SLOT.unpack_from(self._map, begin)
        generation, _, _, offset, payload, text, rows, width, code, summed, created, checksum, _ = fields
        if generation & 1:
            return None
        if code >= len(DTYPES) or payload != rows * width * DTYPES[code].itemsize or not payload:
            raise EntryDamaged("the arena's slot has a shape and a size that disagree")
        if text > MAX_TEXT_BYTES or offset + payload + text > self._geometry.data_bytes:
            raise EntryDamaged("the arena's slot points out of the arena")
        end = self._geometry.data_at + offset + payload
        try:
            said = json.loads(self._map[end : end + text])
            header = EntryHeader(
                fingerprint=self.fingerprint,
                modality=str(said["modality"]),
                metadata=said["metadata"],
                dtype_name=DTYPE_NAMES[code],
                shape=(rows, width),
                checksum=checksum.hex(),
                created=created,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EntryDamaged(f"the arena's slot cannot be read: {error!r}") from error
        self._populate()
        tensor = self._data[offset : offset + payload].view(DTYPES[code]).view(rows, width)
        word = self._geometry.slots_at // 8 + slot * SLOT_WORDS
        return Located(word, generation, header, tensor, checksum if summed else None)

    def _populate(self) -> None:
        """Faults in what the producer has taken since, once instead of at each page's first use."""
        committed = self._words[COMMITTED_WORD]
        if committed <= self._populated or committed > self._geometry.data_bytes:
            return
        begin = self._geometry.data_at + self._populated
        begin -= begin % mmap.PAGESIZE
        try:
            self._map.madvise(_POPULATE_READ, begin, committed - self._populated)
        except OSError:
            pass  # an older kernel: pages are faulted in as they are read
        self._populated = committed

    def _remember(self, key: str, located: Located) -> None:
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]  # the one found longest ago
        self._known[key] = located


def verify(tensor: torch.Tensor, located: Located) -> None:
    """Checks a copy against the entry's checksum, where it has one. Raises `EntryDamaged`."""
    if located.checksum is not None and digest(tensor) != located.checksum:
        raise EntryDamaged("the payload does not match its checksum")


def _read_header(path: Path, descriptor: int) -> tuple[Geometry, str]:
    start = os.pread(descriptor, HEADER.size, 0)
    size = os.fstat(descriptor).st_size
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        raise EntryDamaged(f"{path} is no arena")
    _, version, slots, buckets, _, data_at, data_bytes, _, _, _, fingerprint = HEADER.unpack(start)
    if version != VERSION:
        raise EntryDamaged(f"{path} is an arena of version {version}; this program knows {VERSION}")
    geometry = Geometry(slots, buckets, data_bytes)
    if not slots or not buckets or geometry.data_at != data_at or geometry.file_bytes != size:
        raise EntryDamaged(f"{path}: the arena's header and its {size} bytes disagree")
    return geometry, fingerprint.rstrip(b"\0").decode("utf-8", "replace")
