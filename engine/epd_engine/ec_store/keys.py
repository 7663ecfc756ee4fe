"""The mm_hash: which encoder output a picture or a sound has under one model.

The key is made by the server from what the encoder will see, never from a client's id. Every field is
framed by a type tag and its length, so that no two different inputs can run into one another (the
collisions of 30x150 and 150x30 pictures seen elsewhere).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd_engine.ec_store.errors import InvalidKey

KEY_VERSION = "epd-mm-1"
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class MediaContent:
    """Decoded media, before any resizing: what it is, its extent, its raw samples.

    `mode` is the sample layout ("RGB", "f32"), `size` its extent ((width, height) in pixels, or
    (samples, rate)), `data` the contiguous samples themselves.
    """

    mode: str
    size: tuple[int, ...]
    data: bytes | bytearray | memoryview


def mm_hash(
    *,
    fingerprint: str,
    modality: str,
    options: Mapping[str, Any],
    content: MediaContent,
    salt: str = "",
) -> str:
    """The key of one media item: 64 hex digits of SHA-256.

    `fingerprint` is the model fingerprint, `options` the processor options of this request (JSON values),
    `salt` keeps tenants apart. Raises ValueError for options that JSON cannot carry.
    """
    digest = hashlib.sha256()
    for tag, value in (
        (b"V", KEY_VERSION.encode()),
        (b"F", fingerprint.encode()),
        (b"M", modality.encode()),
        (b"O", canonical_json(options).encode()),
        (b"S", salt.encode()),
        (b"m", content.mode.encode()),
        (b"s", ",".join(map(str, content.size)).encode()),
        (b"d", content.data),
    ):
        view = memoryview(value).cast("B")
        digest.update(tag + len(view).to_bytes(8, "little"))
        digest.update(view)
    return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN. Raises ValueError or TypeError otherwise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def check_key(key: object) -> str:
    """The key itself if it is a well-formed mm_hash, else `InvalidKey`."""
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise InvalidKey("an mm_hash is 64 lower-case hex digits")
    return key
