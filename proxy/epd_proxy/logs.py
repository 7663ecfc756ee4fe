"""JSON logs on standard error, one event a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

_log = logging.getLogger("epd_proxy")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(level: str) -> None:
    """Send every logger of the process, uvicorn's too, through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def info(event: str, **fields: object) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info(event, extra={"fields": fields})


def warning(event: str, **fields: object) -> None:
    _log.warning(event, extra={"fields": fields})


def error(event: str, **fields: object) -> None:
    _log.error(event, extra={"fields": fields})


def failure(event: str, **fields: object) -> None:
    """An error that nobody expected, with its traceback."""
    _log.exception(event, extra={"fields": fields})
