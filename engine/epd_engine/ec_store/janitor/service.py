"""The janitor's process: its loop, until it is told to end.

What if a peer is slow, dead, restarted or lies? A janitor that dies holds up nobody but its successor, for
the lease's few seconds. A volume that does not answer is tried again at the next turn. Whatever goes wrong in
a look, the next one begins anew: what is known of the store is scratch.
"""

import logging
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event

from epd_engine.ec_store.arena import MemoryUsage, memory_usage, sweep
from epd_engine.ec_store.credit import someone_new_or_waiting
from epd_engine.ec_store.janitor.clearing import Cleared
from epd_engine.ec_store.janitor.index import Index
from epd_engine.ec_store.janitor.keeper import Keeper, Totals, Usage
from epd_engine.ec_store.janitor.lease import LeaseHeld, LeaseLost, StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace, Stopped

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25  # how soon a writer that waits, or is new, is noticed
STANDBY_SECONDS = 2.0
ROUND_SECONDS = 60.0  # between two rounds of re-checks
STUCK_SECONDS = 120.0  # without a sign of life; a volume that hangs looks like this


class Service:
    """Keeps a store of files, a directory of shared memory, or both."""

    def __init__(
        self, path: Path | None, memory_path: Path | None, limits: Limits, interval: float, index: Path | None
    ):
        """`interval` is the seconds between two looks; `index` a local directory for scratch (None: a
        temporary one)."""
        self.path, self.memory_path, self.limits, self.interval = path, memory_path, limits, interval
        self._scratch = index
        self._stop = Event()
        self.pace = Pace(limits.rate, self._stop)
        self._lease = None if path is None else StoreLease(path)
        self._index: Index | None = None
        self._keeper: Keeper | None = None
        self._memory_due = self._look_due = self._round_due = 0.0
        # What the HTTP side reads; each is replaced as a whole.
        self.usage: Usage | None = None
        self.memory: MemoryUsage | None = None
        self.totals = Totals()
        self.errors = 0
        self.swept = Counter[str]()
        self.look_seconds = 0.0
        self.leading = self.ready = False

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() - self.pace.beat > STUCK_SECONDS

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until `stop`, or SIGTERM or SIGINT in the main thread; then the lease is free at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        try:
            while True:
                self._turn()
        except Stopped:
            log.info("told to end")
        finally:
            self._drop_keeper()
            if self._lease is not None:
                self._lease.release()

    def _turn(self) -> None:
        self.pace.go_on()
        now = time.monotonic()
        if self.memory_path is not None and now >= self._memory_due:
            self._memory_due = now + self.interval
            self._sweep_memory(self.memory_path)
        if self.path is not None and (now >= self._look_due or self._is_awaited()):
            self._look_due = now + self.interval
            self._guarded(self._look)
        elif (self._keeper is not None and not self._guarded(self._keeper.recheck)) or self._keeper is None:
            self._stop.wait(TICK_SECONDS)
        self.ready = self.ready or self.path is None

    def _is_awaited(self) -> bool:
        return (
            self._keeper is not None
            and self.path is not None
            and someone_new_or_waiting(self.path, self._keeper.writers)
        )

    def _look(self) -> bool:
        keeper = self._keeper or self._take_over()
        began = time.monotonic()
        cleared = keeper.cycle()
        self.look_seconds = time.monotonic() - began
        self.usage, self.totals, self.ready = keeper.usage, keeper.totals, True
        _tell(cleared, keeper.usage)
        return True

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """What `work` answers; False when it could not be done, which ends what is known of the store."""
        try:
            return work()
        except LeaseHeld as held:
            if not self.ready:
                log.info("standing by: %s", held)
            self.ready = True  # nothing is wrong with this one
            self._look_due = time.monotonic() + min(self.interval, STANDBY_SECONDS)
        except LeaseLost as lost:
            log.warning("not the janitor any more: %s", lost)
        except (OSError, sqlite3.Error) as error:
            self.errors += 1
            log.error("the store at %s cannot be looked at: %s", self.path, error)
        self._drop_keeper()
        return False

    def _take_over(self) -> Keeper:
        assert self._lease is not None
        assert self.path is not None
        if self._lease.token is None:
            token = self._lease.acquire()
            log.info("the janitor of %s", self.path, extra={"token": token})
        with tempfile.TemporaryDirectory(prefix="epd-janitor-", dir=self._scratch) as scratch:
            self._index = Index(Path(scratch) / "index.sqlite")
        self._keeper = Keeper(self.path, self.limits, self._lease, self._index, self.pace, self.totals)
        self.leading = True
        return self._keeper

    def _drop_keeper(self) -> None:
        self._keeper, self.leading = None, False
        if self._index is not None:
            self._index.close()
            self._index = None

    def _sweep_memory(self, directory: Path) -> None:
        try:
            swept = sweep(directory)
            self.memory = memory_usage(directory)
        except OSError as error:
            self.errors += 1
            log.error("shared memory in %s cannot be swept: %s", directory, error)
            return
        self.swept["segment"] += len(swept)
        if swept:
            log.info("removed what dead processes left", extra={"segments": swept})


def _tell(cleared: Cleared, usage: Usage | None) -> None:
    if usage is None or not (cleared.entries or cleared.refused):
        return
    counts = {"bytes": usage.bytes, "entries": usage.entries, "capacity": usage.capacity}
    log.info(
        "cleared",
        extra={
            "cleared": dict(cleared.entries),
            "leased": cleared.leased,
            "refused": cleared.refused,
            **counts,
        },
    )
