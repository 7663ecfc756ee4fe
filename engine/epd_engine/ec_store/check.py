"""An entry read against its checksum, without torch and in a few MiB of memory."""

import os
from pathlib import Path

import xxhash

from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import PlainHeader, parse_header
from epd_engine.ec_store.layout import read_into, read_start

CHUNK = 1 << 20


def check_file(path: Path | str) -> PlainHeader:
    """The header of a whole entry. An entry without a checksum passes by its header and length alone.

    Raises `EntryDamaged` or OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start, file_bytes = read_start(descriptor)
        header, offset = parse_header(memoryview(start), file_bytes, PlainHeader, foreign=True)
        if header.checksum:
            check_payload(descriptor, offset, header)
        return header
    finally:
        os.close(descriptor)


def check_payload(descriptor: int, offset: int, header: PlainHeader) -> None:
    """The payload of an open entry against the checksum in its header. Raises `EntryDamaged` or OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK, header.payload_bytes)))
    end = offset + header.payload_bytes
    for at in range(offset, end, CHUNK):
        part = buffer[: min(CHUNK, end - at)]
        read_into(descriptor, part, at)
        digest.update(part)
    if digest.hexdigest() != header.checksum:
        raise EntryDamaged("the payload does not match its checksum")
