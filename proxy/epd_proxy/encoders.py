"""The encoder stage: one primer call, and what an encoder answers to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from epd_proxy.config import Limits
from epd_proxy.errors import EngineAnswer, ProxyError
from epd_proxy.jsonbody import JsonBody
from epd_proxy.media import MediaItem, Primed, primer_doc
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Instance, Lease
from epd_proxy.upstream import Failed, Role, busy, call_headers

_KEY = re.compile(r"[A-Za-z0-9_-]{1,256}")
_NO_ROOM_SECONDS = 1  # readers make room within moments, unless the volume is truly full
_PRIMER_PLACE = re.compile(rb"messages\[0\]\.content\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class PrimerCall:
    """What a primer takes over from the request that needs it."""

    body: JsonBody
    request_id: str
    authorization: bytes | None


class Encoders:
    """Primer calls to the instances of the encoder role."""

    def __init__(self, role: Role, limits: Limits, metrics: Metrics) -> None:
        self.role = role
        self._limits = limits
        self._metrics = metrics

    async def encode(self, call: PrimerCall, items: Sequence[MediaItem], lease: Lease) -> list[Primed]:
        """Have the leased encoder, or another one after it, encode `items`; their answers in order.

        Raises EngineAnswer with the encoder's own 4xx, or ProxyError 502, 503 or 504.
        """
        body = call.body.render(primer_doc(call.body.doc, items))
        headers = call_headers(call.request_id, call.authorization)
        deadline = asyncio.get_running_loop().time() + self._limits.primer

        async def attempt(instance: Instance, another_may_follow: bool) -> list[Primed]:
            left = deadline - asyncio.get_running_loop().time()
            # A hanging encoder leaves half of the time to the next one.
            budget = left / 2 if another_may_follow else left
            self._metrics.primers.inc()
            with self._metrics.primer_seconds.time():
                answer = await self.role.post(instance, headers, body, budget, "encoding")
            return self._primed(instance, answer, items)

        primed = await self.role.call(lease, call.request_id, attempt)
        self._metrics.primed_items.inc(len(items))
        return primed

    def _primed(self, instance: Instance, answer: EngineAnswer, items: Sequence[MediaItem]) -> list[Primed]:
        where = f"encoder {instance.origin.url}"
        if answer.status == 200:
            try:
                primed = read_primer_answer(answer.body, len(items))
                return [replace(one, encoder=instance.origin.url) for one in primed]
            except NotPublished as error:
                final = ProxyError(
                    503, f"{where}: {error}", code="ec_store_unavailable", retry_after=_NO_ROOM_SECONDS
                )
                raise Failed(final, "not_published", sent=True) from None
            except ValueError as error:
                final = ProxyError(502, f"{where} gave a malformed answer: {error}", code="bad_primer_answer")
                raise Failed(final, "malformed", sent=True) from None
        if answer.status in (429, 503):
            raise busy(answer)
        if answer.blames_client:
            raise EngineAnswer(answer.status, answer.headers, in_clients_places(answer.body, items))
        text = answer.body[:500].decode(errors="replace")
        final = ProxyError(502, f"{where} failed with status {answer.status}: {text}", code="encoder_error")
        raise Failed(final, f"status_{answer.status}", sent=True)


class NotPublished(Exception):
    """A well-formed answer leaves items out: the store had no room for them, or could not be written."""


def read_primer_answer(body: bytes, count: int) -> list[Primed]:
    """The answer for each of `count` items. Raises NotPublished where items are left out, as vLLM does with
    those that could not be saved; ValueError where it is malformed or covers an item twice."""
    document = orjson.loads(body)
    params = document.get("ec_transfer_params") if isinstance(document, dict) else None
    if not isinstance(params, dict):
        raise ValueError("no ec_transfer_params")
    primed: list[Primed | None] = [None] * count
    for mm_hash, entry in params.items():
        if not _KEY.fullmatch(mm_hash):
            raise ValueError(f"{mm_hash[:64]!r} is no key")
        indices, metadata = _read_entry(entry)
        for index in indices:
            if not 0 <= index < count or primed[index] is not None:
                raise ValueError(f"item index {index} is out of range or given twice")
            primed[index] = Primed(mm_hash, metadata)
    covered = [one for one in primed if one is not None]
    if len(covered) < count:
        raise NotPublished(f"only {len(covered)} of {count} media items could be put into the EC store")
    return covered


def in_clients_places(body: bytes, items: Sequence[MediaItem]) -> bytes:
    """An encoder's refusal with the places of the primer's items turned into the client's places."""

    def place(match: re.Match[bytes]) -> bytes:
        index = int(match[1])
        return str(items[index].place).encode() if index < len(items) else match[0]

    return _PRIMER_PLACE.sub(place, body)


def _read_entry(entry: Any) -> tuple[list[int], dict[str, Any]]:
    if not isinstance(entry, dict):
        raise ValueError("an entry of ec_transfer_params is no object")
    indices, metadata = entry.get("item_indices"), entry.get("metadata")
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise ValueError("item_indices is no list of integers")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError("metadata is no object")
    return indices, metadata or {}
