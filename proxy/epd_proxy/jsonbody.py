"""JSON bodies whose long strings are never parsed, copied or escaped.

A picture arrives as megabytes of base64 inside one JSON string. The parser would copy it and the
serialiser would escape it again, both on the event loop. `JsonBody` lifts such strings out first, parses
what is left, and splices the same bytes back where the document is rendered.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import orjson

Chunks = list[bytes | memoryview]

LIFT_FROM = 16 * 1024
"""Shorter strings (bytes) are left to the parser: a splice costs more than it saves."""

# Stands in for a lifted string; it reads as a data URL, and nobody outside can guess it.
_NONCE = f"data:,{secrets.token_hex(16)}."
_STAND_IN = re.compile(re.escape(_NONCE.encode()) + rb"(\d+)\.")
# What a long string starts with: a data URL, or the `data` field of an `input_audio`.
_OPENING = re.compile(rb'"(?=data:)|"data"\s*:\s*"')


class JsonBody:
    """One parsed body: `doc` is the document, with stand-ins where long strings were."""

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError when `raw` is not JSON."""
        self._lifted: list[memoryview] = []
        self.doc: Any = orjson.loads(self._lift(raw) if len(raw) >= LIFT_FROM else raw)

    def _lift(self, raw: bytes) -> bytes:
        """Cut the long strings out of `raw`.

        In valid JSON a quote with no backslash before it delimits a string, and a string without a
        backslash ends at the next quote; anything else stays where it is, for the parser to judge.
        """
        view, done, at = memoryview(raw), 0, 0
        kept: Chunks = []
        while (at := raw.find(b'"data', at)) >= 0:
            opening = _OPENING.match(raw, at)
            if opening is None or raw[at - 1 : at] == b"\\":
                at += 1
                continue
            start, end = opening.end(), raw.find(b'"', opening.end())
            if end - start >= LIFT_FROM and _is_plain(raw, start, end):
                kept += [view[done:start], f"{_NONCE}{len(self._lifted)}.".encode()]
                self._lifted.append(view[start:end])
                done = end
            at = max(end, start)
        return b"".join([*kept, view[done:]])

    def render(self, value: Any, *, canonical: bool = False) -> Chunks:
        """JSON text of `value`, a part of `doc` or made of parts of it, in pieces to be sent in turn.

        `canonical` sorts the keys, so that equal values give equal text. Raises ValueError for a value
        that is nested too deeply.
        """
        try:
            text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS if canonical else None)
        except orjson.JSONEncodeError as error:
            raise ValueError(str(error)) from None
        if not self._lifted:
            return [text]
        pieces: Chunks = list(_STAND_IN.split(text))
        for i in range(1, len(pieces), 2):
            pieces[i] = self._lifted[int(bytes(pieces[i]))]
        return pieces


def _is_plain(raw: bytes, start: int, end: int) -> bool:
    """Whether the string's bytes are its characters: no escapes, and ASCII (the whole body mostly is)."""
    return raw.find(b"\\", start, end) < 0 and (raw.isascii() or raw[start:end].isascii())
