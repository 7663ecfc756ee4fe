"""Credit: how writers stay inside the store's budget without asking anyone for each save. No torch.

After every look at the store the janitor publishes `<root>/.janitor/report`: the budget, the bytes used, and
how many bytes each writer may write until it knows better. The protocol:

- A writer announces itself by a file `<root>/.janitor/writers/<id>` and renews its time while it saves. The
  janitor counts a writer until its file is `PRESENCE_SECONDS` old.
- Reports are numbered (token of the janitor's lease, then sequence). The look behind report n+1 begins after
  report n was published. So what was in place before n+1 was published is in the numbers of n+2, and maybe
  in no earlier ones. A writer reads the report before each save, and again once the entry is in place, and
  charges itself with everything since it saw the report *before* the last.
- `credit = (budget - used) / (2 * (writers + 1))`. The halving is what makes the sum safe: every writer can
  have one credit of an old report out that a look did not see, and one of the new. `+ 1` is for a writer
  that was not there at the last look.
- While the store is below its budget, a writer with nothing charged may write one entry whatever its
  credit, so that large entries in a small store, and new writers, are not locked out. Hence the bound: the
  bytes on disk exceed the budget by at most one entry a writer.
- A writer out of credit leaves `<id>.wants` beside its file, which makes the janitor look at once, waits a
  few seconds for a newer report, and then fails: to its caller the store is full.

No report: there is no janitor, and no limit. What if the janitor is dead, restarted, slow or lies? Dead: its
report stays, credit runs out, and saves fail with the report's age in the message, as on a full disk.
Restarted: a higher token. Paused, and woken after another took over: it finds that out before it publishes
(`janitor/lease.py`), and writers ignore a report of a lower token. A report that cannot be read changes
nothing; a writer that has read none before writes nothing, since there may be a limit. A writer that is
killed is counted until its file is too old; one that was idle for so long starts as a new one.
"""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from epd_engine.ec_store.errors import StoreUnavailable
from epd_engine.ec_store.layout import FILE_MODE, JANITOR_DIRECTORY, make_directory, publish_text

REPORT_NAME = "report"
WRITERS_NAME = "writers"
WANTS_SUFFIX = ".wants"
PRESENCE_SECONDS = 60.0  # a writer that has not saved for so long is not counted
RENEW_SECONDS = 5.0
WAIT_SECONDS = 5.0  # for a newer report, once the credit is used up
POLL_SECONDS = 0.05
MAX_REPORT_BYTES = 1 << 20


@dataclass(frozen=True)
class Report:
    """What the janitor saw: bytes, entries, and the bytes that each of `writers` may write."""

    token: int
    sequence: int
    time: float  # wall clock of the janitor, for people only
    budget: int
    used: int
    entries: int
    credit: int
    writers: tuple[str, ...]

    @property
    def number(self) -> tuple[int, int]:
        return self.token, self.sequence

    def publish(self, root: Path) -> None:
        """Raises OSError."""
        publish_text(root / JANITOR_DIRECTORY / REPORT_NAME, json.dumps(asdict(self)))


def credit_per_writer(budget: int, used: int, writers: int) -> int:
    return max(0, (budget - used) // (2 * (writers + 1)))


def read_report(root: Path) -> Report | None:
    """The janitor's last report; None where there is none. Raises ValueError for one that is no report."""
    try:
        with open(root / JANITOR_DIRECTORY / REPORT_NAME, "rb") as file:
            return _parse(file.read(MAX_REPORT_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None


def live_writers(root: Path, now: float) -> tuple[tuple[str, ...], bool]:
    """Ids of writers that saved within `PRESENCE_SECONDS` of `now`, and whether one of them is waiting.

    `now` is by the file system's clock. Files of writers that are gone are deleted, and so are the marks of
    waiting: they are answered by the report that follows.
    """
    found, waiting = [], False
    try:
        files = list(os.scandir(root / JANITOR_DIRECTORY / WRITERS_NAME))
    except FileNotFoundError:
        return (), False
    for file in files:
        try:
            fresh = now - file.stat(follow_symlinks=False).st_mtime < PRESENCE_SECONDS
            if file.name.endswith(WANTS_SUFFIX):
                waiting |= fresh
                os.unlink(file.path)
            elif fresh:
                found.append(file.name)
            else:
                os.unlink(file.path)
        except OSError:
            continue  # it has gone by itself
    return tuple(sorted(found)), waiting


def someone_new_or_waiting(root: Path, known: tuple[str, ...]) -> bool:
    """Whether a look at the store should come early; changes nothing."""
    try:
        names = set(os.listdir(root / JANITOR_DIRECTORY / WRITERS_NAME))
    except OSError:
        return False
    return any(name.endswith(WANTS_SUFFIX) for name in names) or not names <= set(known)


class WriterCredit:
    """One writer's account. Thread-safe."""

    def __init__(self, root: Path, *, wait_seconds: float = WAIT_SECONDS):
        self.id = secrets.token_hex(8)
        self._root, self._wait_seconds = root, wait_seconds
        self._path = str(root / JANITOR_DIRECTORY / REPORT_NAME)
        self._presence = str(root / JANITOR_DIRECTORY / WRITERS_NAME / self.id)
        self._renewed = -RENEW_SECONDS
        self._lock = Lock()
        self._stamp: tuple[int, int] | None = None  # inode and time of the report file last read
        self._report: Report | None = None
        # Bytes finished since the report before the last was seen, since the last was seen, and not finished.
        self._before = self._since = self._in_flight = 0

    def take(self, size: int) -> bool:
        """Whether `size` bytes may be written now; if so they are charged until `settle`.

        Raises `StoreUnavailable` for an entry that is larger than the whole budget, and where the budget
        cannot be known.
        """
        with self._lock:
            problem = self._refresh()
            report = self._report
            if report is None and problem is not None:
                raise StoreUnavailable(f"the report of the EC store's janitor cannot be read: {problem}")
            if report is None:
                self._in_flight += size
                return True
            if size > report.budget:
                raise StoreUnavailable(
                    f"an entry of {size} bytes is larger than the EC store's budget of {report.budget}"
                )
            self._announce()
            charged = self._before + self._since + self._in_flight
            listed = self.id in report.writers
            if report.credit <= 0 or (charged and not (listed and charged + size <= report.credit)):
                return False
            self._in_flight += size
            return True

    def wait(self, size: int, deadline: float | None = None) -> None:
        """As `take`, but waits for credit until `deadline` (of `time.monotonic`), else a few seconds.

        Raises `StoreUnavailable` when none came.
        """
        deadline = time.monotonic() + self._wait_seconds if deadline is None else deadline
        wanted = 0.0
        while not self.take(size):
            now = time.monotonic()
            if now >= deadline:
                raise StoreUnavailable(self._full())
            if now - wanted > 1.0:
                wanted = now
                _touch(self._presence + WANTS_SUFFIX)
            time.sleep(POLL_SECONDS)

    def settle(self, size: int, *, written: bool) -> None:
        """A save is over: what was written stays charged until the janitor has certainly seen it."""
        with self._lock:
            self._in_flight -= size
            if written:
                self._refresh()
                self._since += size

    def deadline(self) -> float:
        return time.monotonic() + self._wait_seconds

    def _full(self) -> str:
        report = self._report
        if report is None:
            return "the EC store is full"
        age = max(0.0, time.time() - report.time)
        return (
            f"the EC store is full: {report.used} of {report.budget} bytes; "
            f"the janitor's last report is {age:.0f} s old"
        )

    def _refresh(self) -> str | None:
        """Reads the report if it is another one; what is wrong with it, if it cannot be read. Opened each
        time: that is what makes NFS ask its server."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._stamp = self._report = None
            self._before = self._since = 0
            return None
        except OSError as error:
            return error.strerror
        try:
            status = os.fstat(descriptor)
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp == self._stamp:
                return None
            report = _parse(os.pread(descriptor, MAX_REPORT_BYTES, 0))
        except (OSError, ValueError) as error:
            return str(error)
        finally:
            os.close(descriptor)
        self._stamp = stamp
        if self._report is None or report.number > self._report.number:
            self._report = report
            self._before, self._since = self._since, 0
        return None

    def _announce(self) -> None:
        now = time.monotonic()
        if now - self._renewed < RENEW_SECONDS:
            return
        if _touch(self._presence):
            self._renewed = now


def _parse(text: bytes) -> Report:
    """Raises ValueError."""
    try:
        document = json.loads(text)
        whole = [int(document[k]) for k in ("token", "sequence", "budget", "used", "entries", "credit")]
        token, sequence, budget, used, entries, credit = whole
        writers = tuple(map(str, document["writers"]))
        return Report(token, sequence, float(document["time"]), budget, used, entries, credit, writers)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the janitor's report cannot be read: {error!r}") from error


def _touch(path: str) -> bool:
    """Makes the file, or sets its time to the file system's now."""
    try:
        try:
            os.utime(path)
        except FileNotFoundError:
            make_directory(os.path.dirname(path))
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                os.fchmod(descriptor, FILE_MODE)
            finally:
                os.close(descriptor)
    except OSError:
        return False
    return True
