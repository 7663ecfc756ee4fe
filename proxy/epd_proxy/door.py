"""The door: who may come in, and what keeps tenants apart in the encoder cache.

Keys come from a JSON file, a Secret mounted as a volume, that holds their digests and not the keys:

    {"keys": [{"name": "team-a", "sha256": "<64 hex digits>", "tenant": "team-a"}]}

A key is random and long, so that its digest needs no slow hash. `tenant` is `name` where it is left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from epd_proxy import logs
from epd_proxy.errors import Unauthorized
from epd_proxy.metrics import Metrics

POLL_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: an API key by its name, and the tenant that it belongs to."""

    key: str
    tenant: str

    def salt(self, given: str | None) -> str:
        """The `cache_salt` of a request, from the tenant and the one that the client gave.

        The same in every replica and after a restart. No client can give a salt that becomes another
        tenant's, since what it gives is hashed together with its own tenant.
        """
        return hashlib.sha256(orjson.dumps(["epd-proxy tenant salt 1", self.tenant, given])).hexdigest()


Keys = Mapping[bytes, Caller]
"""Callers by the digest of their key."""


def read_keys(text: bytes) -> Keys:
    """The keys of a file. Raises ValueError with the entry at fault, and never what a field holds."""
    document = orjson.loads(text)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise ValueError('the file must be {"keys": [...]} and nothing else')
    keys: dict[bytes, Caller] = {}
    names: set[str] = set()
    for i, entry in enumerate(entries):
        digest, caller = _read_entry(entry, f"keys[{i}]")
        if digest in keys or caller.key in names:
            raise ValueError(f"keys[{i}] has the name or the key of another entry")
        keys[digest] = caller
        names.add(caller.key)
    return keys


def _read_entry(entry: Any, where: str) -> tuple[bytes, Caller]:
    if not isinstance(entry, dict) or not {"name", "sha256"} <= set(entry) <= {"name", "sha256", "tenant"}:
        raise ValueError(f"{where} must have name and sha256, may have tenant, and nothing else")
    name, digest = entry["name"], entry["sha256"]
    tenant: Any = entry.get("tenant", name)
    for field, value in (("name", name), ("tenant", tenant)):
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError(f"{where}.{field} must be 1 to 63 letters, digits or ._-")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{where}.sha256 must be 64 hex digits")
    return bytes.fromhex(digest), Caller(name, tenant)


class Door:
    """Lets requests in by their API key; without a file of keys it is open."""

    def __init__(self, path: Path | None, metrics: Metrics) -> None:
        """Raises OSError or ValueError when there is a path and no good file at it."""
        self._path = path
        self._metrics = metrics
        self._keys: Keys = {}
        self._seen: object = None
        self._polling: asyncio.Task[None] | None = None
        if path is not None:
            self._seen = _stamp(path)
            self._keys = _load(path)

    def start(self) -> None:
        """Say who may come in, and follow the file."""
        if self._path is None:
            logs.warning("door_open", reason="no --api-keys-file: whoever reaches this address is served")
            return
        logs.info("api_keys", keys=len(self._keys), file=str(self._path))
        self._polling = asyncio.create_task(self._poll())

    def stop(self) -> None:
        if self._polling is not None:
            self._polling.cancel()

    def admit(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Who sent a request with these headers; None when the door is open. Raises Unauthorized."""
        if self._path is None:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        digest = hashlib.sha256(key.strip()).digest()
        caller = None
        # All are compared, each in constant time: how long it takes tells nothing about any of them.
        for known, its in self._keys.items():
            if hmac.compare_digest(known, digest):
                caller = its
        if caller is None:
            raise Unauthorized("the API key is not known here")
        return caller

    def count(self, caller: Caller) -> None:
        """Count a request that is over, unless its key is gone meanwhile: that series must not come back."""
        if caller in self._keys.values():
            self._metrics.key_requests.labels(caller.key, caller.tenant).inc()

    def passed_on(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The `authorization` that engines get: a key that was for the proxy goes no further."""
        return headers.get(b"authorization") if self._path is None else None

    async def _poll(self) -> None:
        assert self._path is not None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._reload(self._path)

    def _reload(self, path: Path) -> None:
        """Take over the file if it changed; one that is gone or broken changes nothing but the log."""
        try:
            stamp: object = _stamp(path)
            if stamp == self._seen:
                return
            keys = _load(path)
        except (OSError, ValueError) as error:
            stamp = str(error) if isinstance(error, OSError) else stamp
            if stamp != self._seen:
                logs.error("api_keys_unusable", reason=str(error), still_in_use=len(self._keys))
            self._seen = stamp
            return
        self._seen = stamp
        for gone in set(self._keys.values()) - set(keys.values()):
            with suppress(KeyError):
                self._metrics.key_requests.remove(gone.key, gone.tenant)
        self._keys = keys
        logs.info("api_keys", keys=len(keys), file=str(path))


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with the file. A Secret's volume swaps a link, which gives another inode."""
    about = path.stat()
    return about.st_mtime_ns, about.st_ino, about.st_size


def _load(path: Path) -> Keys:
    with path.open("rb") as file:
        text = file.read(_MAX_FILE + 1)
    if len(text) > _MAX_FILE:
        raise ValueError(f"the file is larger than {_MAX_FILE} bytes")
    try:
        return read_keys(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the file is not JSON: {error}") from None
