"""Damaged entries are kept aside for people to look at, a bounded number of them."""

import os
import time
from pathlib import Path

from epd_engine.ec_store.layout import ENTRY_NAME, QUARANTINE_DIRECTORY, make_directory

MAX_ENTRIES = 100
MAX_SHARE = 0.05  # of the store's budget


class Quarantine:
    """`<root>/.quarantine/<time>.<namespace>.<mm_hash>`; its bytes count as used."""

    def __init__(self, root: Path):
        self._directory = root / QUARANTINE_DIRECTORY
        self.bytes = self.entries = 0

    def take_in(self, namespace: str, base: Path, key: str) -> None:
        """Moves an entry here. Raises OSError."""
        make_directory(self._directory)
        name = f"{time.time_ns()}.{namespace}.{key}"
        os.rename(f"{base}/{key}/{ENTRY_NAME}", self._directory / name)

    def trim(self, budget: int) -> None:
        """Deletes the oldest beyond the bounds, and counts the rest. Raises OSError."""
        try:
            files = sorted(os.scandir(self._directory), key=lambda f: f.name, reverse=True)
        except FileNotFoundError:
            self.bytes = self.entries = 0
            return
        kept = total = 0
        for file in files:
            size = file.stat(follow_symlinks=False).st_size
            if kept < MAX_ENTRIES and total + size <= budget * MAX_SHARE:
                kept, total = kept + 1, total + size
            else:
                os.unlink(file.path)
        self.entries, self.bytes = kept, total
