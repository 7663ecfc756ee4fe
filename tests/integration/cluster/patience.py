"""Waiting for a value that comes about by itself."""

import time
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE_S = 120.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"never came true: {what}")
