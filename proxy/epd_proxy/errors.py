"""Errors as the client sees them: OpenAI's error body, and what goes back unchanged from an engine."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

Headers = list[tuple[bytes, bytes]]


class ProxyError(Exception):
    """A request that ends here, in the client's terms.

    `status` is the HTTP status; `code`, `type` and `param` are the fields of OpenAI's error body;
    `retry_after` (seconds) becomes the header of that name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The JSON body, `{"error": {...}}`; it is also the payload of an error event."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    @property
    def headers(self) -> Headers:
        headers = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers


class BadRequest(ProxyError):
    """A body that the client can mend; `param` names the field, such as `messages[0].content`."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(400, message, code=code, param=param)


class Unauthorized(ProxyError):
    """No API key, or one that is not known."""

    def __init__(self, message: str) -> None:
        super().__init__(401, message, code="invalid_api_key")

    @property
    def headers(self) -> Headers:
        return [*super().headers, (b"www-authenticate", b"Bearer")]


class EcMiss(ProxyError):
    """The encoder cache still lacks an item after its re-prime; the client may try again."""

    def __init__(self) -> None:
        message = "an encoded media item was gone from the encoder cache, and again after it was re-encoded"
        super().__init__(503, message, code="ec_miss", retry_after=1)


class KvMiss(ProxyError):
    """The prompt's KV did not reach a decode instance, twice; the client may try again."""

    def __init__(self, reason: str) -> None:
        message = f"the KV of the prompt did not reach a decode instance, twice: {reason}"
        super().__init__(503, message, code="kv_miss", retry_after=1)


class KvIncompatible(ProxyError):
    """A decode instance refuses the KV of a prefill instance: another model, revision or layout."""

    def __init__(self, reason: str) -> None:
        message = f"no decode instance takes what the prefill instance has computed: {reason}"
        super().__init__(503, message, code="kv_incompatible", retry_after=1)


class Unavailable(ProxyError):
    """No instance of a role can take the request now."""

    def __init__(self, role: str, reason: str) -> None:
        super().__init__(503, f"no {role} {reason}", code=f"no_{role}_available", retry_after=1)


@dataclass
class EngineAnswer(Exception):
    """An engine's own answer that ends the request: it goes back with status and body unchanged."""

    status: int
    headers: Headers
    body: bytes

    @property
    def blames_client(self) -> bool:
        """Whether another try with the same input would be refused again."""
        return 400 <= self.status < 500 and self.status != 429
