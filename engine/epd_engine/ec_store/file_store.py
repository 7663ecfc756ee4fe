"""Entries as files: `<root>/<namespace>/<mm_hash>/encoder_cache.safetensors`.

What if a peer is slow, dead, restarted or lies?
- A writer that dies leaves a temporary file that no reader ever opens.
- Two writers of one key each rename a whole file: the last one wins, and both are right.
- A reader believes nothing: header, length, expectation and checksum are checked before use.
- A look-up has no side effects; only a save makes directories.
"""

import io
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from epd_engine.ec_store.entry import (
    MAX_HEADER_BYTES,
    EntryHeader,
    Expectation,
    checksum,
    decode_header,
    encode_header,
    payload_view,
)
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, StoreUnavailable
from epd_engine.ec_store.keys import check_key

ENTRY_NAME = "encoder_cache.safetensors"
DIRECTORY_MODE = 0o2770  # setgid: entries of every pod belong to the volume's group
FILE_MODE = 0o660


class FileStore:
    """The file form of the EC store, for any number of writers and readers on one volume."""

    def __init__(
        self, root: Path, namespace: str, *, fsync: bool = True, verify: bool = True, touch: bool = True
    ):
        """`root` must exist by the first save; `namespace` is one path component or empty.

        `fsync` flushes a payload before it becomes visible, `verify` checks its checksum at every load,
        `touch` marks an entry as used when it is loaded. Raises ValueError for a namespace with a path in it.
        """
        if namespace in (".", "..") or "/" in namespace or "\0" in namespace:
            raise ValueError(f"namespace {namespace!r} must be one path component")
        self._base = root / namespace if namespace else root
        self._fsync, self._verify, self._touch = fsync, verify, touch

    def path(self, key: str) -> Path:
        """Where the entry of `key` lies. Raises `InvalidKey`."""
        return self._base / check_key(key) / ENTRY_NAME

    def probe(self, key: str, expected: Expectation, *, deep: bool = False) -> EntryHeader:
        """The header of a usable entry; `deep` reads the payload against its checksum too.

        Raises `EntryMissing`, `EntryDamaged`, `StoreUnavailable` or `InvalidKey`.
        """
        if deep:
            return self._read(key, expected, verify=True)[0]
        with self._open(key) as file:
            header, _ = _read_header(file)
        expected.check(header)
        return header

    def load(self, key: str, expected: Expectation, device: torch.device) -> torch.Tensor:
        """A tensor `[num_embeds, width]` of the entry's dtype on `device`, copied once out of the file.

        Raises as `probe` does.
        """
        _, tensor = self._read(key, expected, verify=self._verify)
        if self._touch:
            self._mark_used(key)
        return tensor.to(device)

    def save(
        self, key: str, tensor: torch.Tensor, *, fingerprint: str, modality: str, metadata: Mapping[str, Any]
    ) -> None:
        """Publishes `tensor` `[num_embeds, width]` under `key`; when this returns, any reader finds it.

        Raises `StoreUnavailable` when the volume refuses, `InvalidKey` for a malformed key.
        """
        path = self.path(key)
        tensor = tensor.detach().to("cpu").contiguous()
        header = encode_header(tensor, fingerprint=fingerprint, modality=modality, metadata=metadata)
        temporary = path.with_name(f".{ENTRY_NAME}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
        try:
            self._make_directories(path.parent)
            self._write(temporary, header, payload_view(tensor))
            os.replace(temporary, path)
            if self._fsync:
                _sync_directory(path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreUnavailable(f"cannot write the EC store at {self._base}: {error.strerror}") from error

    def _write(self, temporary: Path, header: bytes, payload: memoryview) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask
            for part in (memoryview(header), payload):
                while len(part):
                    part = part[file.write(part) :]
            if self._fsync:
                os.fdatasync(descriptor)

    def _make_directories(self, directory: Path) -> None:
        for level in (self._base, directory):
            try:
                level.mkdir()
            except FileExistsError:
                continue
            level.chmod(DIRECTORY_MODE)

    def _mark_used(self, key: str) -> None:
        try:
            os.utime(self.path(key))
        except OSError:
            return  # read-only mount, another owner, or just deleted: recency is only a hint

    def _read(self, key: str, expected: Expectation, *, verify: bool) -> tuple[EntryHeader, torch.Tensor]:
        # Read straight into the tensor rather than through a mapping: it is one copy either way, and a
        # file that shrinks meanwhile is a short read here but a SIGBUS there.
        with self._open(key) as file:
            header, offset = _read_header(file)
            expected.check(header)
            tensor = torch.empty(header.shape, dtype=header.dtype)
            payload = payload_view(tensor)
            file.seek(offset)
            done = 0
            while done < len(payload):
                count = file.readinto(payload[done:])
                if not count:
                    raise EntryDamaged(f"the payload ends after {done} of {len(payload)} bytes")
                done += count
        if verify and checksum(payload) != header.checksum:
            raise EntryDamaged("the payload does not match its checksum")
        return header, tensor

    @contextmanager
    def _open(self, key: str) -> Iterator[io.FileIO]:
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                yield file
        except (FileNotFoundError, NotADirectoryError) as error:
            raise EntryMissing(f"no entry {key}") from error
        except OSError as error:
            raise StoreUnavailable(f"cannot read the EC store at {self._base}: {error.strerror}") from error


def _read_header(file: io.FileIO) -> tuple[EntryHeader, int]:
    start = file.read(8 + MAX_HEADER_BYTES)
    return decode_header(memoryview(start), os.fstat(file.fileno()).st_size)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
