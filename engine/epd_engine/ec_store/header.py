"""An entry's header, without torch: what the janitor and the command line read.

The layout is safetensors' own: 8 bytes of header length (little-endian), a JSON header, the raw tensor
bytes. A reader bounds and checks every field before it believes one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from epd_engine.ec_store.errors import EntryDamaged

TENSOR_NAME = "ec_cache"
FORMAT_VERSION = "1"
CHECKSUM = "xxh3-128"
NO_CHECKSUM = "none"
MAX_HEADER_BYTES = 64 * 1024
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class PlainHeader:
    """What an entry says of itself.

    `shape` is `(num_embeds, width)`, `dtype_name` safetensors' name of the dtype ("F32", "BF16", "F16"),
    `metadata` the placeholder's, `created` seconds of the wall clock. `foreign`: the entry is another
    program's and says nothing but its dtype and shape; the other fields are empty. `checksum` is empty too
    where the writer made none.
    """

    fingerprint: str
    modality: str
    metadata: Mapping[str, Any]
    dtype_name: str
    shape: tuple[int, int]
    checksum: str
    created: float
    foreign: bool = False

    @property
    def payload_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * ITEM_BYTES[self.dtype_name]


HeaderType = TypeVar("HeaderType", bound=PlainHeader)


def parse_header(
    data: memoryview, file_bytes: int, kind: type[HeaderType], *, foreign: bool = False
) -> tuple[HeaderType, int]:
    """The header of an entry as a `kind`, and the payload's offset. `data` holds at least the header.

    `foreign` accepts an entry without our metadata, as vLLM's file connector writes it.
    Raises `EntryDamaged` for anything that is not exactly one `ec_cache` tensor filling the file.
    """
    length = header_length(data, file_bytes)
    if 8 + length > len(data):
        raise EntryDamaged(f"a header of {length} bytes in a file of {file_bytes}")
    try:
        document = json.loads(bytes(data[8 : 8 + length]))
        tensor = document[TENSOR_NAME]
        said = _our_metadata(document, foreign)
        rows, width = (int(n) for n in tensor["shape"])
        header = kind(
            fingerprint=str(said["model_fingerprint"]) if said else "",
            modality=str(said["modality"]) if said else "",
            metadata=json.loads(said["placeholder"]) if said else {},
            dtype_name=tensor["dtype"],
            shape=(rows, width),
            checksum=str(said["checksum"]) if said else "",
            created=float(said["created"]) if said else 0.0,
            foreign=not said,
        )
        whole = [0, header.payload_bytes] == list(tensor["data_offsets"])
        whole = whole and not set(document) - {"__metadata__", TENSOR_NAME}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise EntryDamaged(f"the header cannot be read: {error!r}") from error
    if rows <= 0 or width <= 0 or not whole or 8 + length + header.payload_bytes != file_bytes:
        raise EntryDamaged(f"the header and the file's {file_bytes} bytes disagree")
    return header, 8 + length


def header_length(data: memoryview, file_bytes: int) -> int:
    """The length of the JSON header, from the first 8 bytes. Raises `EntryDamaged` beyond reason."""
    if len(data) < 8:
        raise EntryDamaged("the file is shorter than its length field")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise EntryDamaged(f"a header of {length} bytes in a file of {file_bytes}")
    return length


def _our_metadata(document: Mapping[str, Any], foreign: bool) -> Mapping[str, Any] | None:
    """Our part of the header; None for an entry of another program where `foreign` allows it.

    Raises `EntryDamaged` for another program's, and for a format version or checksum that we do not read.
    """
    said = document.get("__metadata__", {})
    if "format_version" not in said:
        if foreign:
            return None
        raise EntryDamaged(
            "the entry carries none of our metadata (another program's, as vLLM's file connector writes "
            "it); the option accept_foreign takes such an entry by its shape and dtype alone"
        )
    if said["format_version"] != FORMAT_VERSION:
        raise EntryDamaged(
            f"the entry has format version {str(said['format_version'])[:20]}, not {FORMAT_VERSION}"
        )
    if said["checksum_algorithm"] != (CHECKSUM if said["checksum"] else NO_CHECKSUM):
        raise EntryDamaged(f"the entry's checksum is {said['checksum_algorithm']!r:.40}, not {CHECKSUM}")
    return dict(said)
