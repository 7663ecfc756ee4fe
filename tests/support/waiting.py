"""Awaiting a condition instead of sleeping."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns once `condition` holds; an AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.05)
