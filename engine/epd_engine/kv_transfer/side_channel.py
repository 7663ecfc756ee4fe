"""What prefill and decode say to each other beside the data: one TCP connection for a pull, JSON in frames.

    decode                                              prefill
    {"purpose": "pull", "transfer", "digest",
     "first", "compatibility"}                     ->
                                                   <-   {"view": {...}, "blocks": [...]}
    reads these blocks                                  keeps them
    {"done": true}                                 ->
                                                   <-   {"released": true}: nobody else had them

`{"purpose": "drop", "transfer"}` alone frees the blocks of a request that has ended before. Prefill says no
with `{"refused": reason}`. A connection that breaks leaves the transfer as it was.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from epd_engine.kv_transfer.nixl_pool import PullError

MAX_FRAME_BYTES = 4 << 20  # the block ids of some million tokens
_LENGTH = struct.Struct(">I")


class Channel:
    """Decode's end."""

    def __init__(self, host: str, port: int, timeout: float):
        """`timeout` is for each step, in seconds. Raises `PullError` where nobody listens."""
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except (OSError, ValueError) as error:
            raise PullError(f"prefill cannot be reached at {host}:{port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Prefill's answer. Raises `PullError` for a refusal, a broken connection, or anything unreadable."""
        try:
            self._socket.settimeout(max(timeout, 0.001))
            self._socket.sendall(frame(message))
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            said = content(self._receive(checked_length(length)))
        except TimeoutError as error:
            raise PullError("prefill did not answer in time") from error
        except (OSError, ValueError) as error:
            raise PullError(f"prefill broke off: {error}") from error
        if "refused" in said:
            raise PullError(f"prefill says: {said['refused']!s:.200}")
        return said

    def _receive(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            part = self._socket.recv(min(length - len(received), 1 << 20))
            if not part:
                raise ConnectionResetError("the connection has ended")
            received += part
        return bytes(received)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Prefill's end. Raises ValueError for what is no frame of ours, or IncompleteReadError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return content(await reader.readexactly(checked_length(length)))


def frame(message: Mapping[str, Any]) -> bytes:
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def content(text: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        said = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    if not isinstance(said, dict):
        raise ValueError("no JSON object")
    return said


def checked_length(length: int) -> int:
    """Raises ValueError."""
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return length
