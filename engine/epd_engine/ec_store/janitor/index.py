"""What the janitor has seen, in SQLite on a local disk, so that its memory does not grow with the store.

The file is scratch: it is made anew at each start by looking at the store, which is the only truth.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE_KIB = 32 * 1024
PROGRESS_STEPS = 200_000  # of SQLite's virtual machine: some hundredths of a second

_TABLES = """
CREATE TABLE entries (base INTEGER, key BLOB, bytes INTEGER, used INTEGER, checked INTEGER);
CREATE TABLE unfinished (base INTEGER, key BLOB, bytes INTEGER, PRIMARY KEY (base, key));
"""
# Made after the first look, when that is several times faster.
_INDEXES = """
CREATE UNIQUE INDEX entries_by_key ON entries (base, key);
CREATE INDEX entries_by_use ON entries (used, base, key);
"""


@dataclass(frozen=True, slots=True)
class Known:
    """An entry as it was last seen; `used` is the file's modification time in ns, `base` a row of bases."""

    base: int
    key: str
    bytes: int
    used: int
    checked: bool


class Index:
    """Entries by key and by time of use, and directories that hold no entry (yet). Not thread-safe."""

    def __init__(self, path: Path):
        """Makes the file, and takes its name away at once: however this process ends, nothing is left of it.

        Raises sqlite3.Error or OSError.
        """
        self._sql = sqlite3.connect(path, isolation_level=None, cached_statements=512)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}", "temp_store=FILE"):
            self._sql.execute(f"PRAGMA {pragma}")
        self._sql.executescript(_TABLES)
        path.unlink()
        self.entries = self.bytes = 0
        self.unfinished_bytes = 0

    def close(self) -> None:
        self._sql.close()

    def finish_first_look(self, breathe: Callable[[], object]) -> None:
        """From here on entries can be found by key and by use. Takes seconds for a million entries, and calls
        `breathe` meanwhile; what that raises ends it by sqlite3.OperationalError."""
        self._sql.set_progress_handler(lambda: bool(breathe()), PROGRESS_STEPS)
        try:
            self._make_indexes()
        finally:
            self._sql.set_progress_handler(None, 0)

    def _make_indexes(self) -> None:
        try:
            self._sql.executescript(_INDEXES)
        except sqlite3.IntegrityError:  # a directory that changed while it was listed may name a key twice
            self._sql.execute(
                "DELETE FROM entries WHERE rowid NOT IN (SELECT min(rowid) FROM entries GROUP BY base, key)"
            )
            totals = self._sql.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM entries").fetchone()
            self.entries, self.bytes = totals
            self._sql.executescript(_INDEXES)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Several changes as one: without it each is written by itself."""
        self._sql.execute("BEGIN")
        try:
            yield
        finally:
            self._sql.execute("COMMIT")

    def unknown(self, base: int, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are in neither table."""
        marks = ",".join("?" * len(keys))
        raw = [bytes.fromhex(key) for key in keys]
        known = {
            row[0].hex()
            for table in ("entries", "unfinished")
            for row in self._sql.execute(
                f"SELECT key FROM {table} WHERE base = ? AND key IN ({marks})", (base, *raw)
            )
        }
        return [key for key in keys if key not in known]

    def count(self, base: int) -> int:
        """Directories known in a base."""
        return sum(
            int(self._sql.execute(f"SELECT count(*) FROM {table} WHERE base = ?", (base,)).fetchone()[0])
            for table in ("entries", "unfinished")
        )

    def add(self, entries: Sequence[Known]) -> None:
        """New entries; they must not be known."""
        self._sql.executemany(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?)",
            ((e.base, bytes.fromhex(e.key), e.bytes, e.used, e.checked) for e in entries),
        )
        self.entries += len(entries)
        self.bytes += sum(entry.bytes for entry in entries)

    def update(self, old: Known, new: Known) -> None:
        self._sql.execute(
            "UPDATE entries SET bytes = ?, used = ?, checked = ? WHERE base = ? AND key = ?",
            (new.bytes, new.used, new.checked, old.base, bytes.fromhex(old.key)),
        )
        self.bytes += new.bytes - old.bytes

    def remove(self, entry: Known) -> None:
        found = self._sql.execute(
            "DELETE FROM entries WHERE base = ? AND key = ?", (entry.base, bytes.fromhex(entry.key))
        )
        self.entries -= found.rowcount
        self.bytes -= entry.bytes * found.rowcount

    def unfinish(self, entry: Known) -> None:
        """The entry's file is gone; what becomes of its directory is to be seen."""
        self.remove(entry)
        self.set_unfinished(entry.base, entry.key, 0)

    def least_recently_used(self, after: Known | None, limit: int) -> list[Known]:
        """Entries in order of use, beginning behind `after`."""
        place = (after.used, after.base, bytes.fromhex(after.key)) if after else (-(2**62), 0, b"")
        return self._entries(
            "WHERE (used, base, key) > (?, ?, ?) ORDER BY used, base, key LIMIT ?", (*place, limit)
        )

    def in_key_order(self, after: tuple[int, str] | None, limit: int, base: int | None = None) -> list[Known]:
        """Entries in order of base and key, beginning behind `after`; of one base, or of all."""
        place = (after[0], bytes.fromhex(after[1])) if after else (-1 if base is None else base, b"")
        only = "" if base is None else f"AND base = {base}"
        return self._entries(f"WHERE (base, key) > (?, ?) {only} ORDER BY base, key LIMIT ?", (*place, limit))

    def set_unfinished(self, base: int, key: str, size: int) -> None:
        """A directory without an entry; `size` is the bytes of what else lies there."""
        self.clear_unfinished(base, key)
        self._sql.execute("INSERT INTO unfinished VALUES (?, ?, ?)", (base, bytes.fromhex(key), size))
        self.unfinished_bytes += size

    def clear_unfinished(self, base: int, key: str) -> None:
        raw = bytes.fromhex(key)
        where = "WHERE base = ? AND key = ?"
        for (size,) in self._sql.execute(f"SELECT bytes FROM unfinished {where}", (base, raw)).fetchall():
            self.unfinished_bytes -= size
        self._sql.execute(f"DELETE FROM unfinished {where}", (base, raw))

    def unfinished(self, after: tuple[int, str] | None, limit: int) -> list[tuple[int, str]]:
        place = (after[0], bytes.fromhex(after[1])) if after else (-1, b"")
        rows = self._sql.execute(
            "SELECT base, key FROM unfinished WHERE (base, key) > (?, ?) ORDER BY base, key LIMIT ?",
            (*place, limit),
        )
        return [(base, key.hex()) for base, key in rows]

    def oldest(self) -> int | None:
        """The least recent time of use, ns."""
        row = self._sql.execute("SELECT min(used) FROM entries").fetchone()
        return None if row is None else row[0]

    def _entries(self, rest: str, values: tuple[object, ...]) -> list[Known]:
        rows = self._sql.execute(f"SELECT base, key, bytes, used, checked FROM entries {rest}", values)
        return [Known(base, key.hex(), size, used, bool(ok)) for base, key, size, used, ok in rows]
