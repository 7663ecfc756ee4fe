"""OpenAI's error body, for everything that goes wrong."""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from epd_engine.core.request import RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = "1"
# Marks the union tags that pydantic puts into a location, so that `param` names only the client's fields.
TAG = "~"


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> JSONResponse:
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if error.status in (429, 503) else {}
    return JSONResponse(error_body(error), error.status, headers)


def as_request_error(error: Exception, request_id: str) -> RequestError:
    """What the client is told, whatever happened; the log gets the reason of what is not its doing."""
    if isinstance(error, RequestError):
        return error
    log.error("a request failed", exc_info=error, extra={"request_id": request_id})
    return RequestError(500, "internal_error", "the server failed on this request; see its log")


def invalid_request(error: ValidationError) -> RequestError:
    """The first problem of a body in the caller's terms: `messages[0].content[1].text: ...`."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = field_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, "invalid_value", f"{param}: {message}" if param else message, param)


def field_path(location: Sequence[str | int]) -> str | None:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG):
            path += f".{part}" if path else part
    return path or None
