"""What lies in a store: bytes against the budget while it runs, and what should not be there afterwards."""

import json
import os
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_engine.ec_store.credit import Report, read_report
from epd_engine.ec_store.layout import ENTRY_NAME, QUARANTINE_DIRECTORY, is_temporary
from epd_engine.ec_store.leases import DIRECTORY as LEASES
from tests.support.processes import BIN
from tests.support.store_items import NAMESPACE

LONG_AGO = 7200.0  # seconds; older than any lease file that is kept for its reader


@dataclass(frozen=True)
class Found:
    """Bytes of a store of files. `hidden` lie beside an entry, left by a process that is dead: the janitor
    learns of them only as it removes them."""

    total: int = 0
    entries: int = 0
    temporaries: int = 0
    quarantined: int = 0
    hidden: int = 0


def walk(root: Path, alive: Collection[int]) -> Found:
    """Everything that counts against the budget."""
    total = entries = temporaries = quarantined = hidden = 0
    for directory in [*_scan(root / NAMESPACE), *_scan(root)]:
        if len(directory.name) != 64 and directory.name != QUARANTINE_DIRECTORY:
            continue
        files = [(file.name, _size(file)) for file in _scan(Path(directory.path))]
        whole = any(name == ENTRY_NAME for name, _ in files)
        for name, size in files:
            total += size
            quarantined += size if directory.name == QUARANTINE_DIRECTORY else 0
            entries += name == ENTRY_NAME
            if is_temporary(name):
                temporaries += 1
                hidden += size if whole and _writer_of(name) not in alive else 0
    return Found(total, entries, temporaries, quarantined, hidden)


def report_of(root: Path) -> Report | None:
    try:
        return read_report(root)
    except (ValueError, OSError):
        return None


def store(action: str, root: Path, *arguments: str, status: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What `epd-engine store ACTION --json` says."""
    command = [str(BIN / "epd-engine"), "store", action, str(root), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in status, f"store {action} ended with {done.returncode}:\n{done.stderr}"
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def age_leases(root: Path) -> None:
    """As if everybody who holds a lease file had been silent for hours."""
    then = time.time() - LONG_AGO
    for file in _scan(root / NAMESPACE / LEASES):
        os.utime(file.path, (then, then))


def lease_files(root: Path) -> list[str]:
    return [file.name for file in _scan(root / NAMESPACE / LEASES)]


def quarantined(root: Path) -> set[str]:
    """Keys of entries that the janitor has set aside."""
    return {file.name.rpartition(".")[2] for file in _scan(root / QUARANTINE_DIRECTORY)}


def arenas(root: Path) -> list[str]:
    return [file.name for file in _scan(root / NAMESPACE) if file.name.endswith((".arena", ".unfinished"))]


def _writer_of(name: str) -> int:
    return int(name.split(".")[-3])


def _scan(directory: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


def _size(file: "os.DirEntry[str]") -> int:
    try:
        return file.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
