"""Processes that lose their life, or their processor, at the worst moments: a signal from outside hardly ever
meets the few microseconds in which an entry is half written."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from epd_engine.ec_store.arena import writer
from epd_engine.ec_store.arena.store import MemoryStore

DIES = "dies in the midst of it"
DEATHS = 0.5  # of what happens to a writer; the rest are pauses
MAX_PAUSE_SECONDS = 0.5
MAX_READER_PAUSE_SECONDS = 2.5  # longer than a lease of the memory's
CHANCES = {"write": 0.1, "rename": 0.02, "index": 0.005, "read": 0.04}


class Crashes:
    """Puts itself into the calls by which this process publishes and reads entries."""

    def __init__(self, rng: random.Random, beat: Callable[[str], None]):
        self._rng, self._beat = rng, beat

    def install(self) -> None:
        """For as long as this process lives."""
        os.writev = self._torn(os.writev)
        os.replace = self._around(os.replace)
        writer.fence = self._with_index(writer.fence)  # type: ignore[attr-defined]
        MemoryStore._find = self._slow(MemoryStore._find)  # type: ignore[method-assign]

    def _strike(self) -> None:
        if self._rng.random() < DEATHS:
            self._beat(DIES)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._rng.uniform(0, MAX_PAUSE_SECONDS))

    def _hits(self, what: str) -> bool:
        return self._rng.random() < CHANCES[what]

    def _torn(self, real: Callable[..., int]) -> Callable[..., int]:
        def writev(descriptor: int, parts: list[memoryview]) -> int:
            if not self._hits("write"):
                return real(descriptor, parts)
            largest = max(parts, key=len)
            done = real(descriptor, [*parts[: parts.index(largest)], largest[: len(largest) // 2]])
            self._strike()
            return done

        return writev

    def _around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def replace(*arguments: Any, **options: Any) -> Any:
            if self._hits("rename"):
                self._strike()
            done = real(*arguments, **options)
            if self._hits("rename"):
                self._strike()
            return done

        return replace

    def _with_index(self, real: Callable[[], None]) -> Callable[[], None]:
        def fence() -> None:
            real()
            if self._hits("index"):
                self._strike()

        return fence

    def _slow(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Between finding an entry and reading it."""

        def find(*arguments: Any) -> Any:
            found = real(*arguments)
            if self._hits("read"):
                time.sleep(self._rng.uniform(0, MAX_READER_PAUSE_SECONDS))
            return found

        return find
