"""Server-sent events of a chat completion stream: whole events, what they say, and the proxy's own."""

from __future__ import annotations

from typing import Any

import orjson

from epd_proxy.errors import ProxyError

_MAX_EVENT = 1 << 20
_ENDS = (b"\n\n", b"\r\n\r\n")


class EventBuffer:
    """Passes bytes on up to the last whole event, so that a stream can end between two events.

    The bytes stay as they are. An event longer than 1 MiB goes through in pieces.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes that complete events, possibly none; the rest waits for its end."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if data.endswith(_ENDS):
            return data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in _ENDS)
        if len(data) - cut > _MAX_EVENT:
            return data
        self._rest = data[cut:]
        return data[:cut]

    def flush(self) -> bytes:
        """What is left when the upstream has ended its body properly."""
        rest, self._rest = self._rest, b""
        return rest


def payloads(events: bytes) -> list[Any]:
    """The JSON payloads of whole events; `None` for one that is no JSON object, such as `[DONE]`."""
    found: list[Any] = []
    for line in events.splitlines():
        if line.startswith(b"data:"):
            try:
                value = orjson.loads(line[5:])
            except orjson.JSONDecodeError:
                value = None
            found.append(value if isinstance(value, dict) else None)
    return found


def is_role_only(payload: Any) -> bool:
    """Whether a chunk only announces the role: vLLM sends it before it knows whether it can answer."""
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or not choices:
        return False
    return all(
        isinstance(choice, dict)
        and not choice.get("finish_reason")
        and isinstance(delta := choice.get("delta"), dict)
        and not any(value for name, value in delta.items() if name != "role")
        for choice in choices
    )


def is_server_error(payload: Any) -> bool:
    """Whether an event says that the engine failed (an error of the client's is none)."""
    error = payload.get("error") if isinstance(payload, dict) else None
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    return not (isinstance(code, int) and code < 500)


def error_event(error: ProxyError) -> bytes:
    return b"data: " + error.body + b"\n\n"
