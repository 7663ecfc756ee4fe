"""The producer's side of an arena."""

import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epd_engine.ec_store.arena.directory import SUFFIX, UNFINISHED, lock
from epd_engine.ec_store.arena.layout import (
    COMMITTED_WORD,
    EPOCH_WORD,
    HEADER,
    MAGIC,
    MAX_TEXT_BYTES,
    PAGE,
    SLOT,
    SLOT_BYTES,
    SLOT_WORDS,
    VERSION,
    Geometry,
    fence,
)
from epd_engine.ec_store.arena.tensors import DTYPES, copied
from epd_engine.ec_store.errors import StoreUnavailable
from epd_engine.ec_store.keys import check_key
from epd_engine.ec_store.mounts import MEMORY_TYPES, filesystem_type

_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_COMMIT_STEP = (
    32 << 20
)  # of memory taken at once; a small arena takes a 64th, so that producers keep to shares
_LEAST_STEP = 1 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_TEXT = json.JSONEncoder(separators=(",", ":"))
_DIRECTORY_MODE, _FILE_MODE = 0o2770, 0o640


def text_of(modality: str, metadata: Mapping[str, Any]) -> bytes:
    """What an entry says in words. Raises `StoreUnavailable` for metadata that is too long to keep."""
    text = _TEXT.encode({"metadata": metadata, "modality": modality}).encode()
    if len(text) > MAX_TEXT_BYTES:
        raise StoreUnavailable(f"placeholder metadata of {len(text)} bytes exceeds {MAX_TEXT_BYTES}")
    return text


class ArenaWriter:
    """Writes one arena; where entries lie is decided elsewhere. Not thread-safe."""

    def __init__(self, directory: Path, data_bytes: int, *, fingerprint: str, checksums: bool):
        """Makes an empty arena of up to `data_bytes` of entries; memory is taken as it is needed.

        `checksums` stores one with each entry. Raises `StoreUnavailable` where `directory` cannot hold it.
        """
        self.geometry = Geometry.of(data_bytes)
        self._checksums = checksums
        self._slots: dict[str, int] = {}
        self._free = list(range(self.geometry.slots - 1, -1, -1))
        self._committed = 0
        self._step = max(_LEAST_STEP, min(_COMMIT_STEP, data_bytes // 64 // PAGE * PAGE))
        try:
            check_mount(directory, self.geometry)
            self._descriptor, self.path = _create(directory)
            self._map = self._lay_out(fingerprint)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot make an arena in {directory}: {error.strerror or error}"
            ) from error
        self._words, self._halves = memoryview(self._map).cast("Q"), memoryview(self._map).cast("I")
        whole = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self._data = whole[self.geometry.data_at :]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    @property
    def is_linked(self) -> bool:
        """Whether readers can still find the arena: somebody may have deleted it."""
        return os.fstat(self._descriptor).st_nlink > 0

    @property
    def committed(self) -> int:
        """Bytes of memory taken for entries."""
        return self._committed

    def put(
        self, key: str, offset: int, tensor: torch.Tensor, *, modality: str, metadata: Mapping[str, Any]
    ) -> None:
        """Publishes `tensor` `[num_embeds, width]` at `offset` of the data; readers see it when this returns.

        The bytes from `offset` on belong to no entry that is still linked. Raises `StoreUnavailable` when
        the tmpfs has no more memory or no slot is left, `ValueError` for a dtype or key that cannot be kept.
        """
        raw, text = bytes.fromhex(check_key(key)), text_of(modality, metadata)
        tensor = tensor.detach()
        code = _DTYPE_CODES.get(tensor.dtype)
        if code is None or tensor.dim() != 2:
            raise ValueError(f"a tensor of {tensor.dtype} and shape {list(tensor.shape)} cannot be stored")
        if key in self._slots:
            self.retire(key)
        if not self._free:
            raise StoreUnavailable(f"all {self.geometry.slots} slots of the arena are taken")
        payload = tensor.numel() * tensor.element_size()
        self._commit(offset + payload + len(text))
        place = self._data[offset : offset + payload].view(tensor.dtype).view(tensor.shape)
        if self._checksums:
            checksum = copied(place, tensor)
        else:
            checksum = bytes(16)
            place.copy_(tensor)
        end = self.geometry.data_at + offset + payload
        self._map[end : end + len(text)] = text
        rows, width = tensor.shape
        fields = (offset, payload, len(text), rows, width, code, self._checksums, time.time(), checksum, raw)
        self._link(key, raw, fields)

    def retire(self, key: str) -> None:
        """Takes the entry from the index; what reads it now will notice. Unknown keys are ignored."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._words[self._slot_word(slot)] += 1  # odd: no entry
        fence()
        bucket = self.geometry.bucket(bytes.fromhex(key))
        following = self._next(slot)
        before, current = None, self._head(bucket)
        while current != slot + 1:
            before, current = current, self._next(current - 1)
        with _IndexChange(self._words):
            if before is None:
                self._set_head(bucket, following)
            else:
                self._set_next(before - 1, following)
        self._free.append(slot)

    def shrink(self, end: int) -> None:
        """Gives memory beyond `end` bytes of data back to the tmpfs. Nothing that is linked lies there."""
        end = min(-(-end // self._step) * self._step, self.geometry.data_bytes)
        begin = self.geometry.data_at + end
        begin += -begin % PAGE
        if end < self._committed and begin < len(self._map):
            self._map.madvise(mmap.MADV_REMOVE, begin, len(self._map) - begin)
            self._set_committed(end)

    def close(self) -> None:
        """Removes the arena; readers keep what they have mapped."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _lay_out(self, fingerprint: str) -> mmap.mmap:
        geometry = self.geometry
        os.ftruncate(self._descriptor, geometry.file_bytes)
        os.posix_fallocate(self._descriptor, 0, geometry.data_at)
        header = HEADER.pack(
            MAGIC,
            VERSION,
            geometry.slots,
            geometry.buckets,
            0,
            geometry.data_at,
            geometry.data_bytes,
            0,
            0,
            secrets.token_bytes(16),
            fingerprint.encode()[:64],
        )
        os.pwrite(self._descriptor, header, 0)
        mapped = mmap.mmap(self._descriptor, geometry.file_bytes)
        os.rename(self.path, self.path.with_suffix(SUFFIX))
        self.path = self.path.with_suffix(SUFFIX)
        return mapped

    def _commit(self, end: int) -> None:
        """Takes memory up to `end` and faults it in: a full tmpfs is an error here, a SIGBUS later."""
        if end <= self._committed:
            return
        wanted = min(-(-end // self._step) * self._step, self.geometry.data_bytes)
        begin = self.geometry.data_at + self._committed
        try:
            os.posix_fallocate(self._descriptor, begin, wanted - self._committed)
        except OSError as error:
            raise StoreUnavailable(
                f"the tmpfs of {self.path} has no room: {error.strerror or error}"
            ) from error
        try:
            self._map.madvise(_POPULATE_WRITE, begin - begin % PAGE, wanted - self._committed)
        except OSError:
            pass  # an older kernel: pages are faulted in by the first write
        self._set_committed(wanted)

    def _set_committed(self, committed: int) -> None:
        self._committed = committed
        self._words[COMMITTED_WORD] = committed

    def _link(self, key: str, raw: bytes, fields: tuple[Any, ...]) -> None:
        slot, bucket = self._free.pop(), self.geometry.bucket(raw)
        begin = self.geometry.slots_at + slot * SLOT_BYTES
        generation = self._words[self._slot_word(slot)]
        SLOT.pack_into(self._map, begin, generation, self._head(bucket), 0, *fields)
        fence()
        self._words[self._slot_word(slot)] = generation + 1 + (generation & 1 ^ 1)  # even again, and new
        with _IndexChange(self._words):
            self._set_head(bucket, slot + 1)
        self._slots[key] = slot

    def _slot_word(self, slot: int) -> int:
        return self.geometry.slots_at // 8 + slot * SLOT_WORDS

    def _head(self, bucket: int) -> int:
        return self._halves[self.geometry.buckets_at // 4 + bucket]

    def _set_head(self, bucket: int, value: int) -> None:
        self._halves[self.geometry.buckets_at // 4 + bucket] = value

    def _next(self, slot: int) -> int:
        return self._halves[2 * self._slot_word(slot) + 2]

    def _set_next(self, slot: int, value: int) -> None:
        self._halves[2 * self._slot_word(slot) + 2] = value


class _IndexChange:
    """The epoch is odd while the block runs."""

    def __init__(self, words: memoryview):
        self._words = words

    def __enter__(self) -> None:
        self._words[EPOCH_WORD] += 1
        fence()

    def __exit__(self, *_: object) -> None:
        fence()
        self._words[EPOCH_WORD] += 1


def check_mount(directory: Path, geometry: Geometry) -> None:
    """Makes `directory`. Raises OSError, and `StoreUnavailable` on no tmpfs or one too small."""
    kind = filesystem_type(directory)
    if kind not in MEMORY_TYPES:
        raise StoreUnavailable(
            f"{directory} is on {kind or 'an unknown file system'}, and an arena needs a tmpfs; "
            "mount one there, or use ECSharedStorageConnector"
        )
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_uid == os.geteuid():
        directory.chmod(_DIRECTORY_MODE)
    stats = os.statvfs(directory)
    total = stats.f_blocks * stats.f_frsize
    if total and geometry.file_bytes > total:
        raise StoreUnavailable(
            f"a capacity of {geometry.data_bytes} bytes (and {geometry.data_at} for the index) exceeds the "
            f"tmpfs at {directory}, which has {total}; lower `capacity` or enlarge the mount"
        )


def _create(directory: Path) -> tuple[int, Path]:
    """A new file under a name that no reader looks at, locked for as long as this process lives."""
    while True:
        path = directory / f"{secrets.token_hex(8)}{UNFINISHED}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        os.fchmod(descriptor, _FILE_MODE)
        if lock(descriptor) and os.fstat(descriptor).st_nlink > 0:
            return descriptor, path
        os.close(descriptor)  # a sweeper was there between the two calls
