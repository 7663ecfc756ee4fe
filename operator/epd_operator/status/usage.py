"""Pure: what a janitor says of its store, and when that is news."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..api.status import StoreStatus, store_summary_of
from .parts import Object

MOST_BYTES = 64 << 10
"""An answer longer than this is none."""
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_NEWS_SHARE = 100
"""One part in so many of the capacity is news."""
_LEAST_NEWS = 1 << 20
"""Where the capacity is not known, fewer bytes than this are none."""


class Usage(BaseModel):
    """The part of a janitor's /usage that is reported; what else it says is not looked at."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    bytes: _Count
    entries: _Count
    capacity: _Count | None = None


def read_usage(body: bytes) -> Usage:
    """A janitor's answer. Raises ValueError for one that cannot be: janitors run beside users' code."""
    if len(body) > MOST_BYTES:
        raise ValueError(f"is longer than {MOST_BYTES} bytes")
    try:
        return Usage.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}") from None


def reported(before: object, usage: Usage | None) -> Object | None:
    """The store's part of the status, from the one `before` and what the janitor said last.

    It stays as it is while nothing is known (this operator has just begun, the janitor is away) and while the
    difference is no news, so that a store at work does not mean a write to the API server at every look.
    """
    known = _known(before)
    if usage is None or (known is not None and not _is_news(known, usage)):
        return None if known is None else _dumped(known)
    fresh = StoreStatus.model_validate(
        {
            "entries": usage.entries,
            "usedBytes": usage.bytes,
            "capacityBytes": usage.capacity,
            "summary": store_summary_of(usage.bytes, usage.capacity),
        }
    )
    return _dumped(fresh)


def _is_news(known: StoreStatus, usage: Usage) -> bool:
    if known.used_bytes is None or (known.capacity_bytes is None) != (usage.capacity is None):
        return True
    if (known.used_bytes == 0) != (usage.bytes == 0):
        return True
    if usage.capacity is None or known.capacity_bytes is None:
        step = max(known.used_bytes // _NEWS_SHARE, _LEAST_NEWS)
    else:
        step = max(usage.capacity // _NEWS_SHARE, 1)
        # Of a whole disk the capacity may waver, too.
        if abs(usage.capacity - known.capacity_bytes) >= step:
            return True
    return abs(usage.bytes - known.used_bytes) >= step


def _known(before: object) -> StoreStatus | None:
    try:
        return StoreStatus.model_validate(before)
    except ValidationError:
        return None


def _dumped(status: StoreStatus) -> Object:
    found: Object = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found
