"""Raw ASGI: reading a request's body within bounds, and writing one response."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from epd_proxy.config import Limits
from epd_proxy.errors import Headers, ProxyError
from epd_proxy.sse import error_event

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")
# Headers of an engine's answer that concern its own connection, or that the proxy sets itself.
_NOT_PASSED_ON = frozenset(
    (
        *(b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer", b"proxy-authenticate"),
        *(b"content-length", b"date", b"server", b"x-request-id"),
    )
)


class Buffer:
    """Bytes of request bodies that are held, over all requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Share:
    """What one request holds of a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._held = 0

    def check(self, size: int) -> None:
        """Raises ProxyError 429 when `size` more bytes are too many for now."""
        if self._buffer.held + size > self._buffer.limit:
            message = "the requests in flight hold as many bytes as this proxy may buffer"
            raise ProxyError(429, message, code="too_many_requests", retry_after=1)

    def grow(self, size: int) -> None:
        """Hold `size` bytes more. Raises ProxyError 429."""
        self.check(size)
        self._held += size
        self._buffer.held += size

    def release(self) -> None:
        """Let go of everything; more than once does no harm."""
        self._buffer.held -= self._held
        self._held = 0


class ClientGone(Exception):
    """The client closed its connection."""


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's `x-request-id`, or a new one where it has none or one that is unfit for logs."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _ID.fullmatch(given) else secrets.token_hex(16)


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limits: Limits, share: Share) -> bytes:
    """The whole body, held by `share`. Raises ProxyError 413, 408 or 429 at the limits, and ClientGone."""
    too_large = ProxyError(
        413, f"the body is larger than the limit of {limits.max_body} bytes", code="body_too_large"
    )
    length = headers.get(b"content-length", b"")
    if length.isdigit():
        if int(length) > limits.max_body:
            raise too_large
        # Said early, but only what has come is held: else a client could fill the buffer with promises.
        share.check(int(length))
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(limits.idle):
                message = await receive()
        except TimeoutError:
            raise ProxyError(408, "the body did not arrive in time", code="body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limits.max_body:
            raise too_large
        share.grow(len(pieces[-1]))
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Response:
    """One response; `status` is 0 until its head has been sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id = request_id.encode()
        self.status = 0

    async def start(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Send the head; without a `length` the body is chunked."""
        kept = [pair for pair in headers if pair[0] not in _NOT_PASSED_ON]
        kept.append((b"x-request-id", self._id))
        if length is not None:
            kept.append((b"content-length", b"%d" % length))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while the client reads more slowly than we write."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers, len(body))
        await self.end(body)

    async def fail(self, error: ProxyError) -> None:
        """Answer with an error: as a body, or as the last event of a stream that has begun."""
        if self.status:
            await self.end(error_event(error))
        else:
            await self.whole(error.status, error.headers, error.body)
