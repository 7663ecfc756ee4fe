"""What must go, in which order.

Entries go by time of use, the least recent first, and never one under a live lease:

1. those past their TTL, and those beyond the entry limit;
2. from above the high-water mark down to the low-water mark.

An entry used within the grace time is spared by all of these but one: while the store is above its high-water
mark and nothing older is left, such entries go too, but only down to the high mark. The alternative would be
a store that is full of what nobody can wait for.

What is in the index may be old, so each file is looked at again before it goes: one that was touched
meanwhile moves back in the order.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from epd_engine.ec_store.janitor.index import Index, Known
from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.janitor.scan import look
from epd_engine.ec_store.layout import ENTRY_NAME
from epd_engine.ec_store.leases import live_leases

BATCH = 64  # deletions between two looks at our own lease
LEASES_SECONDS = 0.5  # how old what we know of the readers' leases may be when an entry goes
NS = 1_000_000_000


@dataclass
class Cleared:
    """What one pass did: entries and bytes by reason, and what it could not touch."""

    entries: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    leased: int = 0  # spared for a live lease
    refused: int = 0  # the volume did not let us


@dataclass
class Clearing:
    """One pass over the least recently used. `usage` tells the bytes in the store, all told."""

    index: Index
    bases: Mapping[int, Path]
    limits: Limits
    lease: StoreLease
    pace: Pace
    usage: Callable[[], int]
    dry_run: bool = False

    def run(self, budget: int, now: float) -> Cleared:
        """Raises `LeaseLost`, `Stopped` or OSError."""
        done = Cleared()
        self._freed = self._gone = 0  # what a dry run would have changed
        high, low = int(budget * self.limits.high_water), int(budget * self.limits.low_water)
        goal = low if self.usage() > high else high
        self._leases_read = -LEASES_SECONDS
        place: Known | None = None
        while batch := self.index.least_recently_used(place, BATCH):
            self.lease.check()
            with self.index.batch():
                for entry in batch:
                    reason = self._reason(entry, now, goal, high)
                    if reason is None:
                        return done
                    if self._is_leased(entry):
                        done.leased += 1
                    else:
                        self._clear(entry, reason, done)
            place = batch[-1]
        return done

    def _is_leased(self, entry: Known) -> bool:
        """As of a moment ago, however slow the pace is and whether or not we were paused. Raises OSError."""
        if time.monotonic() - self._leases_read >= LEASES_SECONDS:
            self._leases = {base: live_leases(path) for base, path in self.bases.items()}
            self._leases_read = time.monotonic()
        return entry.key in self._leases[entry.base]

    def _reason(self, entry: Known, now: float, goal: int, high: int) -> str | None:
        """Why this entry, the least recently used that is left, must go. None: no more need to."""
        age = now - entry.used / NS
        used = self.usage() - self._freed
        limits = self.limits
        if age >= limits.grace:
            if limits.ttl is not None and age > limits.ttl:
                return "ttl"
            if limits.max_entries is not None and self.index.entries - self._gone > limits.max_entries:
                return "count"
            if used > goal:
                return "capacity"
        return "full" if used > high else None

    def _clear(self, entry: Known, reason: str, done: Cleared) -> None:
        if not self.dry_run:
            self.pace.take()
        if self._is_leased(entry):  # since
            done.leased += 1
            return
        base = self.bases[entry.base]
        try:
            seen = look(base, entry.key)
            if seen is None:
                self.index.unfinish(entry)
                return
            if seen.used > entry.used:
                moved = Known(entry.base, entry.key, seen.bytes, seen.used, entry.checked)
                self.index.update(entry, moved)
                return
            if self.dry_run:
                self._freed, self._gone = self._freed + entry.bytes, self._gone + 1
            else:
                self.lease.guard()
                os.unlink(f"{base}/{entry.key}/{ENTRY_NAME}")
                if remove_if_empty(base, entry.key):
                    self.index.remove(entry)
                else:
                    self.index.unfinish(entry)
        except OSError:
            done.refused += 1
            return
        done.entries[reason] += 1
        done.bytes[reason] += entry.bytes


def remove_if_empty(base: Path, key: str) -> bool:
    """Whether the directory is gone. It stays where a save is at work in it."""
    try:
        os.rmdir(f"{base}/{key}")
    except OSError:
        return False  # not empty, or gone
    return True
