"""One entry's bytes: a safetensors file that holds the tensor `ec_cache` and says what it is.

Any safetensors reader, vLLM's file connector included, can read what we write. Written by hand rather than
by the library for two reasons: the payload goes to the file without a copy, and a reader bounds and checks
every field before it believes one. The header's own parser is `header.py`, which needs no torch.
"""

import ctypes
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import (
    CHECKSUM,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    NO_CHECKSUM,
    TENSOR_NAME,
    PlainHeader,
    parse_header,
)

__all__ = [
    "CHECKSUM",
    "FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "PAYLOAD_ALIGNMENT",
    "TENSOR_NAME",
    "EntryHeader",
    "Expectation",
    "checksum",
    "decode_header",
    "encode_header",
    "payload_view",
]

PAYLOAD_ALIGNMENT = 64  # bytes; where an entry starts at a cache line, so does its payload

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER, _PLACEHOLDER = json.JSONEncoder(separators=(",", ":")), json.JSONEncoder(sort_keys=True)
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


@dataclass(frozen=True)
class EntryHeader(PlainHeader):
    """A header whose dtype torch knows."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_name]


@dataclass(frozen=True)
class Expectation:
    """What a reader needs an entry to be. `None` leaves a field open."""

    fingerprint: str
    num_embeds: int
    width: int
    dtype: torch.dtype | None = None
    metadata: Mapping[str, Any] | None = None

    def check(self, header: EntryHeader) -> None:
        """Raises `EntryDamaged` with the first difference.

        A foreign entry, where the reader took one, has neither fingerprint nor metadata to differ.
        """
        said = () if header.foreign else (("model fingerprint", header.fingerprint, self.fingerprint),)
        placed = () if header.foreign else (("placeholder metadata", header.metadata, self.metadata),)
        for name, found, wanted in (
            *said,
            ("number of embeddings", header.shape[0], self.num_embeds),
            ("width", header.shape[1], self.width),
            ("dtype", header.dtype, self.dtype),
            *placed,
        ):
            if wanted is not None and found != wanted:
                raise EntryDamaged(f"the entry's {name} is {found}, expected {wanted}")


def payload_view(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, without a copy; keeps the tensor alive."""
    # Not through numpy: after the copy of a large entry no code is in the processor's caches any more, and
    # that path is long: 30 us of the 100 that a load of 1 MiB takes.
    assert tensor.is_contiguous(), "its bytes lie in order"
    assert tensor.device.type == "cpu", "its bytes can be reached"
    room: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    room.tensor = tensor
    return memoryview(room).cast("B")


def checksum(payload: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(payload)


def encode_header(
    tensor: torch.Tensor,
    *,
    fingerprint: str,
    modality: str,
    metadata: Mapping[str, Any],
    checked: bool = True,
) -> bytes:
    """The bytes that precede the payload: length, JSON, padding to `PAYLOAD_ALIGNMENT`.

    `tensor` is a contiguous CPU tensor `[num_embeds, width]` of float32, bfloat16 or float16. Without
    `checked` the entry carries no checksum. Raises ValueError for another dtype or number of dimensions.
    """
    if tensor.dtype not in _DTYPE_NAMES or tensor.dim() != 2:
        raise ValueError(
            f"an entry is a matrix of float32, bfloat16 or float16, not {tensor.dtype} {tuple(tensor.shape)}"
        )
    header = {
        "__metadata__": {
            "format_version": FORMAT_VERSION,
            "model_fingerprint": fingerprint,
            "modality": modality,
            "placeholder": _PLACEHOLDER.encode(metadata),
            "created": f"{time.time():.3f}",
            "checksum_algorithm": CHECKSUM if checked else NO_CHECKSUM,
            "checksum": checksum(payload_view(tensor)) if checked else "",
        },
        TENSOR_NAME: {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [0, tensor.nbytes],
        },
    }
    text = _HEADER.encode(header).encode()
    text += b" " * (-(8 + len(text)) % PAYLOAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def decode_header(data: memoryview, file_bytes: int, *, foreign: bool = False) -> tuple[EntryHeader, int]:
    """The header of an entry and the payload's offset; as `header.parse_header`."""
    return parse_header(data, file_bytes, EntryHeader, foreign=foreign)
