"""Entries as files: `<root>/<namespace>/<mm_hash>/encoder_cache.safetensors`.

What if a peer is slow, dead, restarted or lies?
- A writer that dies leaves a temporary file that no reader ever opens.
- Two writers of one key each rename a whole file: the last one wins, and both are right.
- A reader believes nothing: header, length, expectation and checksum are checked before use.
- A look-up has no side effects; only a save makes directories.
- Another node's view may be a moment old (NFS): what cannot be found there, or not as it should be, is
  looked for again after the directories were asked for anew. Nothing relies on flock, atime or inotify.
- The janitor takes a directory away under a save: the directory is made again.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import xxhash

from epd_engine.ec_store.check import check_payload
from epd_engine.ec_store.credit import WriterCredit
from epd_engine.ec_store.entry import (
    EntryHeader,
    Expectation,
    decode_header,
    payload_view,
)
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, StoreError, StoreUnavailable
from epd_engine.ec_store.file_batch import NewEntry, SaveBatch
from epd_engine.ec_store.keys import check_key
from epd_engine.ec_store.layout import (
    ENTRY_NAME,
    LOCAL_TYPES,
    check_namespace,
    read_into,
    read_start,
    read_whole,
    refresh_directory,
)
from epd_engine.ec_store.mounts import MEMORY_TYPES, filesystem_type

Verify = Literal["always", "sample", "never"]
SAMPLE_EVERY = 16  # under `sample`, the first load of a store object and every 16th after it
HEADER_ALLOWANCE = 1024  # bytes charged for an entry's header
TOUCH_SECONDS = 1.0  # how exactly the time of an entry's last use is known
VERIFY_CHUNK = 1 << 20  # bytes read and then checked while the processor still has them

# Seconds before each look that follows a failed one, on a volume whose view may be old.
RECHECK = (0.0,)
PATIENT_RECHECK = (0.0, 0.02, 0.1, 0.3)

__all__ = ["FileStore", "NewEntry", "Verify"]

T = TypeVar("T")


class FileStore:
    """The file form of the EC store, for any number of writers and readers on one volume. Thread-safe."""

    def __init__(
        self,
        root: Path,
        namespace: str,
        *,
        fsync: bool | None = None,
        verify: bool | Verify = "always",
        touch: bool = True,
        accept_foreign: bool = False,
    ):
        """`root` must exist by the first save; `namespace` is one path component or empty.

        `fsync` flushes payload and directory entry before a save returns (None: unless the root is in
        memory). `verify` says which loads check the payload's checksum (True and False stand for `always`
        and `never`); with `never`, saves write none either, and readers that check refuse such an entry.
        `touch` marks an entry as used when it is loaded. `accept_foreign` reads entries without our
        metadata too, by shape and dtype alone: they have no fingerprint and no checksum, so it is for a
        directory that only one model uses. Raises ValueError for a namespace with a path in it.
        """
        check_namespace(namespace)
        self._root, self._base = str(root), str(root / namespace)
        kind = filesystem_type(root)
        self._fsync = kind not in MEMORY_TYPES if fsync is None else fsync
        self._view_may_be_old = kind not in LOCAL_TYPES
        self._verify: Verify = verify if isinstance(verify, str) else "always" if verify else "never"
        self._touch, self._foreign = touch, accept_foreign
        self._loads = count()
        self._start_bytes = 8  # in front of the payload, in the entry that was read last
        self._credit = WriterCredit(root)

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies. Raises `InvalidKey`."""
        return Path(self._directory(key), ENTRY_NAME)

    def probe(
        self, key: str, expected: Expectation, *, deep: bool = False, patient: bool = False
    ) -> EntryHeader:
        """The header of a usable entry; `deep` reads the payload against its checksum too,
        unless the store never verifies.

        `patient`: the caller knows that the entry is there, so on a volume whose view may be old it is
        looked for again for up to half a second. Raises `EntryMissing`, `EntryDamaged`, `StoreUnavailable`
        or `InvalidKey`.
        """

        def read(descriptor: int) -> EntryHeader:
            header, offset = self._header(descriptor, expected)
            if deep and self._verify != "never" and not header.foreign:
                _need_checksum(header)
                check_payload(descriptor, offset, header)
            return header

        return self._read(key, read, patient)

    def load(
        self,
        key: str,
        expected: Expectation,
        device: torch.device,
        into: torch.Tensor | None = None,
        *,
        patient: bool = False,
    ) -> torch.Tensor:
        """A tensor `[num_embeds, width]` of the entry's dtype on `device`, copied once out of the file.

        `into` is a contiguous CPU tensor to fill: of the entry's shape and dtype, or of uint8 and at least as
        many bytes. On the CPU the answer is a view of it. After an error its content is anything.
        Raises as `probe` does, and ValueError for an `into` that does not fit.
        """

        verify = self._verifies()
        shape, dtype = (expected.num_embeds, expected.width), expected.dtype

        def read(descriptor: int) -> torch.Tensor:
            tensor = None if dtype is None else _room(shape, dtype, device, into)
            if tensor is None or not self._load_whole(descriptor, expected, payload_view(tensor), verify):
                header, offset = self._header(descriptor, expected)
                tensor = _room(header.shape, header.dtype, device, into) if tensor is None else tensor
                _fill(payload_view(tensor), descriptor, offset, header, verify)
                self._start_bytes = offset
            if self._touch:
                _mark_used(descriptor)
            return tensor

        tensor = self._read(key, read, patient)
        return tensor if device.type == "cpu" else tensor.to(device)

    def save(
        self, key: str, tensor: torch.Tensor, *, fingerprint: str, modality: str, metadata: Mapping[str, Any]
    ) -> None:
        """Publishes `tensor` `[num_embeds, width]` under `key`; when this returns, any reader finds it.

        Raises `StoreUnavailable` when the volume refuses, `InvalidKey` for a malformed key.
        """
        for failure in self.save_many([NewEntry(key, tensor, fingerprint, modality, metadata)]).values():
            raise failure

    def save_many(self, entries: Iterable[NewEntry]) -> dict[str, StoreError]:
        """Publishes several entries and shares what flushing costs: all are written, then all are flushed,
        then all become visible, then each directory is flushed once. Where a janitor keeps the store inside
        a budget (`credit.py`), waits a few seconds in all for room.

        Returns the failures by key; whatever is not in there can be found by any reader.
        """
        failures: dict[str, StoreError] = {}
        batch = self._batch()
        deadline = self._credit.deadline()
        try:
            for entry in entries:
                try:
                    directory, size = self._directory(entry.key), entry.tensor.nbytes + HEADER_ALLOWANCE
                    if not self._credit.take(size):
                        failures |= self._publish(batch)  # what is ready need not wait for room
                        batch = self._batch()
                        self._credit.wait(size, deadline)
                    batch.write(directory, entry, size)
                except OSError as error:
                    failures[entry.key] = self._refused(error)
                except StoreError as error:
                    failures[entry.key] = error
            failures |= self._publish(batch)
        finally:
            batch.discard()
        return failures

    def _batch(self) -> SaveBatch:
        return SaveBatch(self._base, self._root, self._verify != "never", self._credit)

    def _publish(self, batch: SaveBatch) -> dict[str, StoreError]:
        failures = batch.publish(self._fsync)
        batch.discard()
        return {key: self._refused(error) for key, error in failures.items()}

    def _refused(self, error: OSError) -> StoreUnavailable:
        refused = StoreUnavailable(f"cannot write the EC store at {self._base}: {error.strerror}")
        refused.__cause__ = error
        return refused

    def _directory(self, key: str) -> str:
        return f"{self._base}/{check_key(key)}"

    def _header(self, descriptor: int, expected: Expectation) -> tuple[EntryHeader, int]:
        header, offset = _parsed(*read_start(descriptor), self._foreign)
        expected.check(header)
        return header, offset

    def _load_whole(self, descriptor: int, expected: Expectation, payload: memoryview, verify: bool) -> bool:
        """Whether all of the entry could be read at once, as it can where its header is as long as the last
        one's: they nearly always are. What is checked afterwards in one piece must not be too large."""
        if verify and len(payload) > VERIFY_CHUNK:
            return False
        start = bytearray(self._start_bytes)
        file_bytes = read_whole(descriptor, start, payload)
        if file_bytes is None:
            return False
        header, _ = _parsed(bytes(start), file_bytes, self._foreign)
        expected.check(header)
        if verify and not header.foreign:
            _need_checksum(header)
            _compare(xxhash.xxh3_128_hexdigest(payload), header)
        return True

    def _verifies(self) -> bool:
        if self._verify == "sample":
            return next(self._loads) % SAMPLE_EVERY == 0
        return self._verify == "always"

    def _read(self, key: str, read: Callable[[int], T], patient: bool) -> T:
        """What `read` makes of the entry's descriptor, looked for again as the volume's nature demands."""
        directory = self._directory(key)
        rechecks = iter(PATIENT_RECHECK if patient else RECHECK)
        failure: StoreError
        while True:
            try:
                return _with_open(f"{directory}/{ENTRY_NAME}", read)
            except (FileNotFoundError, NotADirectoryError) as error:
                again, failure = self._view_may_be_old, EntryMissing(f"no entry {key}")
                failure.__cause__ = error
            except EntryDamaged as error:
                again, failure = self._view_may_be_old, error
            except OSError as error:
                again = error.errno == errno.ESTALE
                failure = StoreUnavailable(f"cannot read the EC store at {self._base}: {error.strerror}")
                failure.__cause__ = error
            wait = next(rechecks, None)
            if not again or wait is None:
                raise failure
            time.sleep(wait)
            for level in (self._base, directory):
                refresh_directory(level)


def _with_open(path: str, read: Callable[[int], T]) -> T:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


@lru_cache(256)
def _parsed(start: bytes, file_bytes: int, foreign: bool) -> tuple[EntryHeader, int]:
    # An entry that is loaded was looked up a moment before: the same bytes need not be understood twice.
    return decode_header(memoryview(start), file_bytes, foreign=foreign)


def _room(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, into: torch.Tensor | None
) -> torch.Tensor:
    """A tensor of the entry's shape and dtype on the CPU: a new one, or `into`, or its first bytes."""
    if into is None:
        # Pinned for a GPU: torch keeps such memory, and copies from it without one more copy in the driver.
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    if into.device.type != "cpu" or not into.is_contiguous():
        raise ValueError("the tensor to load into must be a contiguous one on the CPU")
    if into.dtype == dtype and into.shape == shape:
        return into
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if into.dtype == torch.uint8 and into.numel() >= nbytes:
        return into.view(-1)[:nbytes].view(dtype).view(shape)
    raise ValueError(f"an entry of {shape} {dtype} does not go into {tuple(into.shape)} {into.dtype}")


def _fill(payload: memoryview, descriptor: int, offset: int, header: EntryHeader, verify: bool) -> None:
    if not verify or header.foreign:
        read_into(descriptor, payload, offset)
        return
    _need_checksum(header)
    digest = xxhash.xxh3_128()
    for at in range(0, len(payload), VERIFY_CHUNK):
        part = payload[at : at + VERIFY_CHUNK]
        read_into(descriptor, part, offset + at)
        digest.update(part)
    _compare(digest.hexdigest(), header)


def _compare(digest: str, header: EntryHeader) -> None:
    if digest != header.checksum:
        raise EntryDamaged("the payload does not match its checksum")


def _need_checksum(header: EntryHeader) -> None:
    if not header.checksum:
        raise EntryDamaged("the entry carries no checksum: its writer's option `verify` is `never`")


def _mark_used(descriptor: int) -> None:
    try:
        # Whoever used it a moment ago has said so. Clocks may differ: then it is said each time.
        if abs(time.time() - os.fstat(descriptor).st_mtime) > TOUCH_SECONDS:
            os.utime(descriptor)  # to "now": that needs write permission only, not ownership
    except OSError:
        return  # read-only mount or gone: recency is only a hint
