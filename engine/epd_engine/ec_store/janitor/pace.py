"""How fast the janitor may go, and when it must stop."""

import time
from collections.abc import Callable
from threading import Event

SHORTEST_WAIT = 0.002  # seconds; a shorter one costs more than it waits


class Stopped(Exception):
    """The process was told to end."""


class Pace:
    """Spreads operations over time; `stop` ends any wait at once."""

    def __init__(self, rate: float, stop: Event, *, clock: Callable[[], float] = time.monotonic):
        self._rate, self._stop, self._clock = rate, stop, clock
        self._next = clock()
        self.beat = clock()  # when something last happened

    def go_on(self) -> None:
        """Raises `Stopped` once told to end."""
        self.beat = self._clock()
        if self._stop.is_set():
            raise Stopped

    def take(self, operations: int = 1) -> None:
        """Returns when that many operations are due. Raises `Stopped`."""
        self.go_on()
        now = self._clock()
        self._next = max(self._next, now - 0.1) + operations / self._rate  # a tenth of a second of burst
        if self._next - now > SHORTEST_WAIT and self._stop.wait(self._next - now):
            raise Stopped
