"""Saves that share what flushing costs."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from epd_engine.ec_store.credit import WriterCredit
from epd_engine.ec_store.entry import encode_header, payload_view
from epd_engine.ec_store.layout import (
    ENTRY_NAME,
    make_directory,
    open_new,
    sync_directory,
    temporary_name,
    write_all,
)

DIRECTORY_RACES = 5  # how often a save makes a directory again that the janitor found empty


@dataclass(frozen=True)
class NewEntry:
    """What a save publishes: `tensor` is `[num_embeds, width]`, on any device."""

    key: str
    tensor: torch.Tensor
    fingerprint: str
    modality: str
    metadata: Mapping[str, Any]


@dataclass
class SaveBatch:
    """Saves that become visible together. After `publish`, or an error, `discard` leaves nothing behind."""

    base: str
    root: str
    checked: bool  # entries carry a checksum
    credit: WriterCredit
    _written: list["_Written"] = field(default_factory=list)
    _changed: set[str] = field(default_factory=set)  # directories whose entries must be flushed

    def write(self, directory: str, entry: NewEntry, size: int) -> None:
        """A temporary file with the whole entry, whose `size` is charged already. Raises OSError."""
        written = _Written(entry.key, directory, f"{directory}/{temporary_name()}", size)
        self._written.append(written)
        tensor = entry.tensor.detach().to("cpu").contiguous()
        header = encode_header(
            tensor,
            fingerprint=entry.fingerprint,
            modality=entry.modality,
            metadata=entry.metadata,
            checked=self.checked,
        )
        try:
            written.descriptor = self._open(directory, written.temporary)
            write_all(written.descriptor, [header, payload_view(tensor)])
        except OSError:
            self._discard(self._written.pop())
            raise

    def publish(self, fsync: bool) -> dict[str, OSError]:
        """Flushes, closes and renames everything that was written; the failures by key."""
        failures: dict[str, OSError] = {}
        for step in (
            (_Written.flush, _Written.close, _Written.rename)
            if fsync
            else (
                _Written.close,  # on a network file system it is here that a full volume shows
                _Written.rename,
            )
        ):
            for written in self._written:
                if written.key in failures:
                    continue
                try:
                    step(written)
                except OSError as error:
                    failures[written.key] = error
        if fsync:
            failures |= self._flush_directories()
        return failures

    def _flush_directories(self) -> dict[str, OSError]:
        failures = {}
        for written in self._written:
            try:
                if not written.temporary:
                    sync_directory(written.directory)
            except OSError as error:
                failures[written.key] = error
        for directory in sorted(self._changed):
            try:
                sync_directory(directory)
            except OSError as error:
                failures |= {written.key: error for written in self._written}
        return failures

    def discard(self) -> None:
        """The end of the batch: removes what did not get its real name, and settles what was charged."""
        while self._written:
            self._discard(self._written.pop())

    def _discard(self, written: "_Written") -> None:
        written.discard()
        self.credit.settle(written.size, written=not written.temporary)

    def _open(self, directory: str, temporary: str) -> int:
        for _ in range(DIRECTORY_RACES):
            try:
                if make_directory(directory):
                    self._changed.add(self.base)
            except FileNotFoundError:
                if make_directory(self.base):
                    self._changed.add(self.root)
                continue
            try:
                return open_new(temporary)
            except FileNotFoundError:
                continue  # the janitor found the directory empty
        raise FileNotFoundError(errno.ENOENT, "its directories go as fast as they are made")


@dataclass
class _Written:
    key: str
    directory: str
    temporary: str  # empty once it has its real name
    size: int
    descriptor: int = -1  # negative before it is open and once it is closed

    def flush(self) -> None:
        os.fdatasync(self.descriptor)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)

    def rename(self) -> None:
        os.replace(self.temporary, f"{self.directory}/{ENTRY_NAME}")
        self.temporary = ""

    def discard(self) -> None:
        try:
            if self.descriptor >= 0:
                self.close()
            if self.temporary:
                os.unlink(self.temporary)
        except OSError:
            return  # the janitor takes temporary files that are left
