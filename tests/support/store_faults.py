"""What goes wrong in a chaos test: a schedule that is a function of the seed, and the hands that do it."""

import errno
import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from epd_engine.ec_store.arena.layout import HEADER, SLOT, SLOT_BYTES, Geometry
from epd_engine.ec_store.layout import ENTRY_NAME
from tests.support.store_items import NAMESPACE

_LASTING = {"stop": (0.5, 3.0), "full": (2.0, 4.0), "forbid": (0.5, 2.0), "stop-janitor": (1.0, 4.0)}
_BALLAST = ".ballast"
_BLOCK = bytes(1 << 16)


@dataclass(frozen=True)
class Fault:
    """`at` and `lasting` in seconds; `pick` in [0, 1) chooses what it hits."""

    at: float
    kind: str
    lasting: float
    pick: float


def schedule(seed: str, seconds: float, rates: dict[str, float]) -> list[Fault]:
    """Faults in order of time, `rates` of each kind a minute; every kind comes at least once."""
    rng = random.Random(seed)
    faults = []
    for kind, rate in sorted(rates.items()):
        count = max(1, round(rate * seconds / 60))
        for n in range(count):  # spread evenly, each at a random moment of its share of the time
            at = seconds * (0.05 + 0.85 * (n + rng.random()) / count)
            low, high = _LASTING.get(kind, (0.0, 0.0))
            faults.append(Fault(at, kind, rng.uniform(low, high), rng.random()))
    return sorted(faults, key=lambda fault: fault.at)


@dataclass
class Volume:
    """A small tmpfs with a store of files or of memory on it, mistreated as root can."""

    root: Path
    flips: dict[str, int] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    _forbidden: dict[Path, int] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        return self.root / NAMESPACE

    def fill(self) -> None:
        """Leaves no block free; to be called again, since what is deleted makes room."""
        try:
            with open(self.root / _BALLAST, "ab", buffering=0) as file:
                while file.write(_BLOCK):
                    pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self.done["full"] += 1

    def empty(self) -> None:
        (self.root / _BALLAST).unlink(missing_ok=True)

    def forbid(self, pick: float) -> Callable[[], None]:
        """Takes permissions from some part of the store; what is returned gives them back."""
        places = [self.root, self.base, self.base / ".leases", self.root / ".janitor"]
        places += [self.root / ".janitor" / "writers", *self._some_entry(pick)]
        rng = random.Random(pick)
        place, mode = rng.choice(places), rng.choice([0o000, 0o550, 0o440])
        try:
            before = place.stat().st_mode & 0o7777
            self._forbidden.setdefault(place, before)
            place.chmod(mode & before)
        except FileNotFoundError:
            return lambda: None
        self.done[f"forbid {place.name if place.name.startswith('.') else 'entry'}"] += 1
        return lambda: self.allow(place)

    def allow(self, place: Path) -> None:
        try:
            place.chmod(self._forbidden.pop(place, place.stat().st_mode & 0o7777))
        except FileNotFoundError:
            return

    def restore(self) -> None:
        for place in list(self._forbidden):
            self.allow(place)
        self.empty()

    def flip(self, pick: float) -> None:
        """Turns one bit of one entry; its time of use stays."""
        rng = random.Random(pick)
        for path, key, begin, length in self._entries(pick):
            try:
                status = path.stat()
                with open(path, "r+b", buffering=0) as file:
                    file.seek(begin + int(length * rng.random() ** 2))  # the header more often
                    byte = file.read(1) or b"\0"
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            except (FileNotFoundError, OSError):
                continue  # deleted at this moment
            self.flips[key] = self.flips.get(key, 0) + 1
            self.done["flip"] += 1
            return

    def _some_entry(self, pick: float) -> list[Path]:
        for path, key, *_ in self._entries(pick):
            return [path, path.parent] if path.name == ENTRY_NAME and key else [path]
        return []

    def _entries(self, pick: float) -> Iterator[tuple[Path, str, int, int]]:
        """Path, key, and where its bytes are, of an entry by `pick`: nothing where there is none."""
        found = sorted(self.base.glob(f"*/{ENTRY_NAME}")) + sorted(self.base.glob("*.arena"))
        if not found:
            return
        path = found[int(len(found) * pick)]
        try:
            if path.name == ENTRY_NAME:
                yield path, path.parent.name, 0, path.stat().st_size
            elif slots := list(_slots(path)):
                yield path, *slots[int(len(slots) * random.Random(pick).random())]
        except FileNotFoundError:
            return


def _slots(arena: Path) -> Iterator[tuple[str, int, int]]:
    """Key, first byte and length of each entry of an arena."""
    with open(arena, "rb") as file:
        _, _, slots, buckets, _, data_at, data_bytes, *_ = HEADER.unpack(file.read(HEADER.size))
        file.seek(Geometry(slots, buckets, data_bytes).slots_at)
        table = file.read(slots * SLOT_BYTES)
    for begin in range(0, len(table) - SLOT.size + 1, SLOT_BYTES):
        try:
            generation, _, _, offset, payload, text, *_, key = SLOT.unpack_from(table, begin)
        except struct.error:
            return
        if payload and not generation & 1:
            yield key.hex(), data_at + offset, payload + text
