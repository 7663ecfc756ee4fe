"""One store under one janitor: looks at it, clears it, and tells the writers what they may write."""

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from epd_engine.ec_store.check import check_file
from epd_engine.ec_store.credit import Report, credit_per_writer, live_writers
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.janitor import scan
from epd_engine.ec_store.janitor.clearing import NS, Cleared, Clearing, remove_if_empty
from epd_engine.ec_store.janitor.index import Index, Known
from epd_engine.ec_store.janitor.kv import KVArea
from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.janitor.quarantine import Quarantine
from epd_engine.ec_store.layout import ENTRY_NAME, refresh_directory
from epd_engine.ec_store.leases import sweep_leases

log = logging.getLogger(__name__)

LOOK_BATCH = 500
RECHECK_BATCH = 100
RECHECK_COST = 4  # operations: re-checks take a quarter of the rate, and leave the rest to what is urgent


@dataclass(frozen=True)
class Usage:
    """What a look found: everything in bytes, entries, or seconds."""

    bytes: int
    entries: int
    capacity: int
    oldest_seconds: float
    unfinished_bytes: int
    quarantined_bytes: int
    quarantined_entries: int
    writers: int
    credit: int
    kv_bytes: int = 0
    kv_transfers: int = 0


@dataclass
class Totals:
    """What this process has done since it started."""

    cycles: int = 0
    cleared: Counter[str] = field(default_factory=Counter)  # entries by reason
    cleared_bytes: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)  # temporary files, directories, lease files
    clearing_seconds: float = 0.0
    quarantined: int = 0
    leased: int = 0
    refused: int = 0


class Keeper:
    """The janitor of the store at `root`, for as long as `lease` is held. Not thread-safe."""

    def __init__(
        self,
        root: Path,
        limits: Limits,
        lease: StoreLease,
        index: Index,
        pace: Pace,
        totals: Totals | None = None,
    ):
        self._root, self.limits, self._lease, self._index, self._pace = root, limits, lease, index, pace
        self._quarantine = Quarantine(root)
        self._kv = KVArea(root, limits, lease, pace)
        self._numbers: dict[str, int] = {}  # namespace -> its number in the index
        self._bases: dict[int, Path] = {}
        self._listed: dict[
            int, tuple[int, bool]
        ] = {}  # base -> its time when listed, and whether it was still
        self._left_alone: set[str] = set()
        self._place: tuple[int, str] | None = None  # where the next re-check begins
        self._looked = False
        self.totals = Totals() if totals is None else totals
        self.usage: Usage | None = None
        self.writers: tuple[str, ...] = ()

    def cycle(self, *, publish: bool = True, dry_run: bool = False) -> Cleared:
        """One look at the store, and what follows from it.

        Raises `LeaseLost`, `Stopped`, or OSError where the volume does not answer.
        """
        self._lease.check()
        budget, now = self.limits.budget(self._root), self._lease.now()
        self.writers, _ = live_writers(self._root, now)
        self._discover()
        if not dry_run:
            self._review_unfinished(now)
            self._quarantine.trim(budget)
            self.totals.removed["kv"] += self._kv.clear(now)
        clearing = Clearing(
            self._index, self._bases, self.limits, self._lease, self._pace, self._used, dry_run
        )
        began = time.monotonic()
        cleared = clearing.run(budget, now)
        self.totals.clearing_seconds += time.monotonic() - began
        if not dry_run:
            self.totals.removed["lease"] += sum(sweep_leases(base) for base in self._bases.values())
        self._account(cleared)
        self._conclude(budget, now, publish)
        return cleared

    def _used(self) -> int:
        return self._index.bytes + self._index.unfinished_bytes + self._quarantine.bytes + self._kv.bytes

    def _account(self, cleared: Cleared) -> None:
        totals = self.totals
        totals.cycles += 1
        totals.cleared += cleared.entries
        totals.cleared_bytes += cleared.bytes
        totals.leased += cleared.leased
        totals.refused += cleared.refused

    def _conclude(self, budget: int, now: float, publish: bool) -> None:
        credit = credit_per_writer(budget, self._used(), len(self.writers))
        oldest = self._index.oldest()
        self.usage = Usage(
            bytes=self._used(),
            entries=self._index.entries,
            capacity=budget,
            oldest_seconds=0.0 if oldest is None else max(0.0, now - oldest / NS),
            unfinished_bytes=self._index.unfinished_bytes,
            quarantined_bytes=self._quarantine.bytes,
            quarantined_entries=self._quarantine.entries,
            writers=len(self.writers),
            credit=credit,
            kv_bytes=self._kv.bytes,
            kv_transfers=self._kv.transfers,
        )
        if not publish:
            return
        self._lease.check()
        assert self._lease.token is not None
        Report(
            token=self._lease.token,
            sequence=self.totals.cycles,  # goes on after an error that ended a keeper, as the token does
            time=time.time(),
            budget=budget,
            used=self._used(),
            entries=self._index.entries,
            credit=credit,
            writers=self.writers,
        ).publish(self._root)

    def _discover(self) -> None:
        """Adds what is new to the index, and drops what somebody else has deleted."""
        for namespace in scan.namespaces(self._root):
            if namespace in self._numbers or self._is_left_alone(namespace):
                continue
            number = self._numbers[namespace] = len(self._numbers)
            self._bases[number] = self._root / namespace
        for number in list(self._bases):
            self._list(number)
        if not self._looked:
            try:
                self._index.finish_first_look(self._breathe)
            except sqlite3.OperationalError:
                self._breathe()  # where that was the reason, it says so
                raise
            self._looked = True

    def _is_left_alone(self, namespace: str) -> bool:
        """Whether it is closed to us and somebody else's, as a volume's lost+found is."""
        base = self._root / namespace
        if scan.is_open(base) or scan.is_ours(base):
            return False
        if namespace not in self._left_alone:
            self._left_alone.add(namespace)
            log.warning("%s is closed to the janitor and left alone", base)
        return True

    def _list(self, number: int) -> None:
        base = self._bases[number]
        refresh_directory(base)
        try:
            scan.check_open(base)  # a report without what lies there would let writers exceed the budget
            changed = os.stat(base).st_mtime_ns
            before, was_still = self._listed.get(number, (-1, False))
            # A name that came within one tick of the clock after a listing does not change the time again: so
            # a directory is left alone only once two listings have found it the same.
            if before == changed and was_still:
                return
            total, names = 0, scan.keys(base)
            while batch := list(islice(names, LOOK_BATCH)):
                self._meet(number, batch)
                total += len(batch)
            self._listed[number] = (changed, before == changed)
        except FileNotFoundError:
            total = 0
            self._listed.pop(number, None)
        if self._looked and self._index.count(number) > total:
            self._drop_vanished(number)

    def _breathe(self) -> None:
        """For use in whatever takes long: ends it when it must end, and keeps our lease fresh."""
        self._pace.go_on()
        self._lease.check()

    @contextmanager
    def _sparing(self, base: Path) -> Iterator[None]:
        """One entry's place that is closed to us must not keep us from the others. Raises PermissionError
        where the whole base is."""
        try:
            yield
        except PermissionError:
            scan.check_open(base)
            self.totals.refused += 1

    def _meet(self, number: int, keys: list[str]) -> None:
        self._breathe()
        base, new = self._bases[number], []
        with self._index.batch():
            for key in self._index.unknown(number, keys) if self._looked else keys:
                seen = None
                with self._sparing(base):
                    seen = scan.look(base, key)
                if seen is None:
                    self._index.set_unfinished(number, key, 0)
                else:
                    new.append(Known(number, key, seen.bytes, seen.used, False))
            self._index.add(new)

    def _drop_vanished(self, number: int) -> None:
        place: tuple[int, str] | None = None
        while known := self._index.in_key_order(place, LOOK_BATCH, number):
            self._breathe()
            with self._index.batch():
                for entry in known:
                    with self._sparing(self._bases[number]):
                        if scan.look(self._bases[number], entry.key) is None:
                            self._index.unfinish(entry)
            place = (number, known[-1].key)

    def _review_unfinished(self, now: float) -> None:
        """Directories without an entry: a save at work, or what is left of one."""
        place: tuple[int, str] | None = None
        while found := self._index.unfinished(place, RECHECK_BATCH):
            self._breathe()
            with self._index.batch():
                for number, key in found:
                    with self._sparing(self._bases[number]):
                        self._review(number, key, now)
            place = found[-1]

    def _review(self, number: int, key: str, now: float) -> None:
        base = self._bases[number]
        seen = scan.look(base, key)
        if seen is not None:
            self._index.clear_unfinished(number, key)
            self._index.add([Known(number, key, seen.bytes, seen.used, False)])
            return
        left = self._remove_leftovers(base, key, now)
        if left is None or (left == 0 and self._remove_old_directory(base, key, now)):
            self._index.clear_unfinished(number, key)
        else:
            self._index.set_unfinished(number, key, left)

    def _remove_leftovers(self, base: Path, key: str, now: float) -> int | None:
        """Bytes of the temporary files that are too young to go; None where the directory is gone."""
        found = scan.leftovers(base, key)
        if found is None:
            return None
        left = 0
        for file in found:
            if now - file.changed <= self.limits.grace:
                left += file.bytes
                continue
            self._pace.take()
            self._lease.guard()
            try:
                os.unlink(file.path)
            except FileNotFoundError:
                continue
            self.totals.removed["temporary"] += 1
        return left

    def _remove_old_directory(self, base: Path, key: str, now: float) -> bool:
        try:
            if now - os.stat(f"{base}/{key}").st_mtime <= self.limits.grace:
                return False
        except FileNotFoundError:
            return True
        self._pace.take()
        self._lease.guard()
        gone = remove_if_empty(base, key)
        self.totals.removed["directory"] += gone
        return gone

    def recheck(self) -> bool:
        """The next few entries in order of their keys: still there, of the same size, whole. Takes as long as
        the rate demands; False at the end of a round. Raises as `cycle` does."""
        known = self._index.in_key_order(self._place, RECHECK_BATCH)
        self._place = (known[-1].base, known[-1].key) if known else None
        self._lease.check()
        now = self._lease.now()
        with self._index.batch():
            for entry in known:
                self._pace.take(RECHECK_COST)
                with self._sparing(self._bases[entry.base]):
                    self._recheck_entry(entry, now)
        return bool(known)

    def _recheck_entry(self, entry: Known, now: float) -> None:
        base = self._bases[entry.base]
        seen = scan.look(base, entry.key)
        if seen is None:
            self._index.unfinish(entry)
            return
        self._remove_leftovers(base, entry.key, now)
        path = f"{base}/{entry.key}/{ENTRY_NAME}"
        whole = True
        try:
            if self.limits.scrub:
                check_file(path)
                self._pace.take(int(seen.bytes * self.limits.rate / self.limits.scrub))
            elif not entry.checked:
                scan.read_header(path)
        except EntryDamaged as error:
            whole = False
            # Another program may write in place: what is young may yet become whole.
            if now - seen.used / NS > self.limits.grace:
                self._set_aside(entry, error)
                return
        except FileNotFoundError:
            return  # the next round sees what became of it
        self._index.update(entry, Known(entry.base, entry.key, seen.bytes, seen.used, whole))

    def _set_aside(self, entry: Known, error: EntryDamaged) -> None:
        base = self._bases[entry.base]
        log.warning("entry %s is damaged and goes to quarantine: %s", entry.key, error)
        self._lease.guard()
        self._quarantine.take_in(base.name if base != self._root else "", base, entry.key)
        if remove_if_empty(base, entry.key):
            self._index.remove(entry)
        else:
            self._index.unfinish(entry)
        self.totals.quarantined += 1
