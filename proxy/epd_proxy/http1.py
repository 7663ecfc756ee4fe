"""An HTTP/1.1 client on httptools, for the path that every request takes.

A general client costs more than the rest of the proxy together (docs/proxy.md has the numbers), and it
hides what a retry must know: whether anything was sent, whether the connection had been used before, and
whether a byte came back. One `Client` serves one role.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from typing import cast

import httptools

from epd_proxy.config import Origin
from epd_proxy.errors import Headers
from epd_proxy.jsonbody import Chunks

IDLE_SECONDS = 4.0
"""Idle connections close before the server's keep-alive (5 s in uvicorn) can close them under a request."""

_MAX_HEAD = 64 * 1024
_PAUSE_AT = 1 << 20


class UpstreamError(Exception):
    """The exchange with an instance failed."""


class Unreachable(UpstreamError):
    """No connection came about: nothing was sent."""


class Disconnected(UpstreamError):
    """The connection was lost before the first byte of the answer, or (`started`) in the middle of it."""

    def __init__(self, message: str, started: bool) -> None:
        super().__init__(message)
        self.started = started


class Garbled(UpstreamError):
    """The answer is not HTTP, or out of bounds."""


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self.reset()

    def reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: Headers = []
        self._head_size = 0
        self.head_done = self.complete = self.started = False
        self._sized = False
        self.error: UpstreamError | None = None
        self._body: list[bytes] = []
        self._body_size = 0

    @property
    def reusable(self) -> bool:
        transport = self.transport
        return self.complete and self.error is None and transport is not None and not transport.is_closing()

    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and self.error is None

    def send(self, head: bytes, body: Chunks) -> None:
        assert self.transport is not None
        if body and len(body) == 1 and len(body[0]) < 16384:
            self.transport.write(head + body[0])
        else:
            self.transport.writelines([head, *body])

    async def wait(self) -> None:
        """Until something arrives."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take_body(self) -> bytes:
        """All body bytes that have arrived since the last call."""
        if not self._body:
            return b""
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._body_size = [], 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return data

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.error = Garbled(str(error.__context__ or error))
        if self.error is not None:
            self.close()
        elif self._body_size > _PAUSE_AT and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.complete and self.error is None:
            if self.head_done and not self._sized and exc is None:
                self.complete = True  # a body without a length ends with its connection
            else:
                self.error = Disconnected(str(exc or "closed by the server"), self.started)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # httptools' callbacks; what they raise comes out of feed_data as the context of its error

    def on_message_begin(self) -> None:
        if self.complete:
            raise Garbled("bytes after the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._head_size > _MAX_HEAD:
            raise Garbled("headers too long")
        name = name.lower()
        self._sized = self._sized or name in (b"content-length", b"transfer-encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.head_done = self.status >= 200

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_size += len(data)

    def on_message_complete(self) -> None:
        if not self.head_done:  # 100 Continue and its like come before the answer
            self.headers, self._sized = [], False
            return
        self.complete = True
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()


class Reply:
    """An answer whose head has arrived. Use as a context manager: leaving early cuts the connection."""

    def __init__(self, client: Client, origin: Origin, connection: _Connection) -> None:
        self._client = client
        self._origin = origin
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    async def chunk(self) -> bytes:
        """The body bytes that have arrived, at least one; `b""` at the end.

        Raises Disconnected or Garbled once the bytes before the fault are handed out.
        """
        connection = self._connection
        while True:
            data = connection.take_body()
            if data:
                return data
            if connection.complete:
                return b""
            if connection.error is not None:
                raise connection.error
            await connection.wait()

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises Garbled past `limit` bytes, and what `chunk` raises."""
        pieces, size = [], 0
        while data := await self.chunk():
            pieces.append(data)
            size += len(data)
            if size > limit:
                raise Garbled(f"an answer of more than {limit} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hand the connection back, or cut it when the answer is not over."""
        self._client.release(self._origin, self._connection)


class Client:
    """Connections to the instances of one role, kept alive between requests."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._idle: dict[str, deque[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None

    async def request(
        self, origin: Origin, method: str, path: str, headers: Headers, body: Chunks | None = None
    ) -> Reply:
        """Send a request and wait for the head of the answer; time limits are the caller's.

        A kept connection that is lost before a byte came back is replaced by a fresh one, once: the server
        may have closed it while it was idle. Raises Unreachable when nothing was sent, Disconnected or
        Garbled.
        """
        head = _head(origin, method, path, headers, body)
        kept = self._take(origin)
        if kept is None:
            return await self._exchange(origin, await self._connect(origin), head, body or [])
        try:
            return await self._exchange(origin, kept, head, body or [])
        except Disconnected as lost:
            if lost.started:
                raise
            try:
                fresh = await self._connect(origin)
            except Unreachable:
                raise lost from None  # the server died, and the request may be why
        return await self._exchange(origin, fresh, head, body or [])

    async def _exchange(self, origin: Origin, connection: _Connection, head: bytes, body: Chunks) -> Reply:
        try:
            connection.send(head, body)
            while not connection.head_done:
                if connection.error is not None:
                    raise connection.error
                await connection.wait()
        except BaseException:
            connection.close()
            raise
        return Reply(self, origin, connection)

    async def _connect(self, origin: Origin) -> _Connection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {self._connect_timeout:g} s") from None
        except OSError as error:
            raise Unreachable(str(error)) from error
        return connection

    def _take(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin.url)
        while idle:
            connection = idle.pop()
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()
                connection.idle_timer = None
            if connection.is_open():
                connection.reset()
                return connection
        return None

    def release(self, origin: Origin, connection: _Connection) -> None:
        """Keep the connection when its exchange is over, else cut it, which tells the instance to stop."""
        if not connection.reusable:
            connection.close()
            return
        timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._expire, origin, connection)
        connection.idle_timer = timer
        self._idle.setdefault(origin.url, deque()).append(connection)

    def _expire(self, origin: Origin, connection: _Connection) -> None:
        """Close, and forget: instances come and go, and their addresses with them."""
        connection.close()
        idle = self._idle.get(origin.url, deque())
        with suppress(ValueError):
            idle.remove(connection)
        if not idle:
            self._idle.pop(origin.url, None)

    def close(self) -> None:
        """Cut all idle connections."""
        for idle in self._idle.values():
            while idle:
                connection = idle.pop()
                if connection.idle_timer is not None:
                    connection.idle_timer.cancel()
                connection.close()


def _head(origin: Origin, method: str, path: str, headers: Headers, body: Chunks | None) -> bytes:
    host = origin.url.partition("://")[2].encode()
    lines = [method.encode() + b" " + path.encode() + b" HTTP/1.1\r\nhost: " + host]
    lines += [name + b": " + value for name, value in headers]
    if body is not None:
        lines.append(b"content-length: %d" % sum(map(len, body)))
    return b"\r\n".join(lines) + b"\r\n\r\n"
