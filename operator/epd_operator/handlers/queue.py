"""Which resources to look at: each once, one at a time, and not too often."""

import asyncio
from collections import Counter

from .cache import Key

SPACING_S = 0.5
"""A resource that changes all the time is looked at this often. Its first change is acted on at once."""
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class WorkQueue:
    """Keys that wait to be worked on. A key that is added while it is worked on comes again afterwards."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._rested_at: dict[Key, float] = {}
        self._failures: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, key: Key) -> None:
        """Lets a key be worked on, as soon as its spacing allows."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            now = asyncio.get_running_loop().time()
            self._add_at(key, max(now, self._rested_at.get(key, now)))

    async def get(self) -> Key:
        """The next key; `done` must follow."""
        key = await self._ready.get()
        self._queued.discard(key)
        self._running.add(key)
        return key

    def done(self, key: Key) -> None:
        """The work on a key went well."""
        self._failures.pop(key, None)
        self._end(key)

    def failed(self, key: Key) -> None:
        """The work on a key is to be tried again, later each time."""
        delay = min(FIRST_RETRY_S * 2 ** min(self._failures[key], 10), LAST_RETRY_S)
        self._failures[key] += 1
        self._end(key)
        if key not in self._queued:
            self._add_at(key, asyncio.get_running_loop().time() + delay)

    def forget(self, key: Key) -> None:
        """Nothing is to be remembered of a key: its resource is gone."""
        self._rested_at.pop(key, None)
        self._failures.pop(key, None)

    def _end(self, key: Key) -> None:
        self._running.discard(key)
        self._rested_at[key] = asyncio.get_running_loop().time() + SPACING_S
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _add_at(self, key: Key, when: float) -> None:
        """At a time, unless it comes earlier anyway."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= when:
                return
            timer.cancel()
            del self._timers[key]
        if when <= loop.time():
            self._now(key)
        else:
            self._timers[key] = loop.call_at(when, self._now, key)

    def _now(self, key: Key) -> None:
        self._timers.pop(key, None)
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)
