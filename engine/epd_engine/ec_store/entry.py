"""One entry's bytes: a safetensors file that holds the tensor `ec_cache` and says what it is.

The layout is safetensors' own (8-byte little-endian header length, JSON header, raw tensor bytes), so
that any safetensors reader, vLLM's file connector included, can read what we write. Written by hand
rather than by the library for two reasons: the payload goes to the file without a copy, and a reader
bounds and checks every field before it believes one.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from epd_engine.ec_store.errors import EntryDamaged

TENSOR_NAME = "ec_cache"
FORMAT_VERSION = "1"
CHECKSUM = "xxh3-128"
MAX_HEADER_BYTES = 64 * 1024
PAYLOAD_ALIGNMENT = 64  # bytes; where an entry starts at a cache line, so does its payload

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True)
class EntryHeader:
    """What an entry says of itself; `shape` is `(num_embeds, width)`, `metadata` the placeholder's."""

    fingerprint: str
    modality: str
    metadata: Mapping[str, Any]
    dtype: torch.dtype
    shape: tuple[int, int]
    checksum: str
    created: float

    @property
    def payload_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@dataclass(frozen=True)
class Expectation:
    """What a reader needs an entry to be. `None` leaves a field open."""

    fingerprint: str
    num_embeds: int
    width: int
    dtype: torch.dtype | None = None
    metadata: Mapping[str, Any] | None = None

    def check(self, header: EntryHeader) -> None:
        """Raises `EntryDamaged` with the first difference."""
        for name, found, wanted in (
            ("model fingerprint", header.fingerprint, self.fingerprint),
            ("number of embeddings", header.shape[0], self.num_embeds),
            ("width", header.shape[1], self.width),
            ("dtype", header.dtype, self.dtype),
            ("placeholder metadata", header.metadata, self.metadata),
        ):
            if wanted is not None and found != wanted:
                raise EntryDamaged(f"the entry's {name} is {found}, expected {wanted}")


def payload_view(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, without a copy."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def checksum(payload: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(payload)


def encode_header(
    tensor: torch.Tensor, *, fingerprint: str, modality: str, metadata: Mapping[str, Any]
) -> bytes:
    """The bytes that precede the payload: length, JSON, padding to `PAYLOAD_ALIGNMENT`.

    `tensor` is a contiguous CPU tensor `[num_embeds, width]` of float32, bfloat16 or float16.
    """
    payload = payload_view(tensor)
    header = {
        "__metadata__": {
            "format_version": FORMAT_VERSION,
            "model_fingerprint": fingerprint,
            "modality": modality,
            "placeholder": json.dumps(metadata, sort_keys=True),
            "created": f"{time.time():.3f}",
            "checksum_algorithm": CHECKSUM,
            "checksum": checksum(payload),
        },
        TENSOR_NAME: {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [0, len(payload)],
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAYLOAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def decode_header(data: memoryview, file_bytes: int) -> tuple[EntryHeader, int]:
    """The header of an entry and the payload's offset. `data` holds at least the header.

    Raises `EntryDamaged` for anything that is not exactly one `ec_cache` tensor filling the file.
    """
    if len(data) < 8:
        raise EntryDamaged("the file is shorter than its length field")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(data):
        raise EntryDamaged(f"a header of {length} bytes in a file of {file_bytes}")
    try:
        document = json.loads(bytes(data[8 : 8 + length]))
        said, tensor = document["__metadata__"], document[TENSOR_NAME]
        rows, width = (int(n) for n in tensor["shape"])
        header = EntryHeader(
            fingerprint=str(said["model_fingerprint"]),
            modality=str(said["modality"]),
            metadata=json.loads(said["placeholder"]),
            dtype=_DTYPES[tensor["dtype"]],
            shape=(rows, width),
            checksum=str(said["checksum"]),
            created=float(said["created"]),
        )
        known = said["format_version"] == FORMAT_VERSION and said["checksum_algorithm"] == CHECKSUM
        whole = [0, header.payload_bytes] == list(tensor["data_offsets"]) and set(document) == {
            "__metadata__",
            TENSOR_NAME,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EntryDamaged(f"the header cannot be read: {error!r}") from error
    if not known:
        raise EntryDamaged("the entry has another format version or checksum algorithm")
    if rows <= 0 or width <= 0 or not whole or 8 + length + header.payload_bytes != file_bytes:
        raise EntryDamaged(f"the header and the file's {file_bytes} bytes disagree")
    return header, 8 + length
