"""The janitor as a user who may not do everything, and after errors."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch

from epd_engine.ec_store.credit import read_report
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.janitor import clearing
from epd_engine.ec_store.janitor.index import Index
from epd_engine.ec_store.janitor.keeper import Keeper, Totals
from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.leases import LeaseTable
from tests.support.users import as_user, give

JANITOR, POD, GROUP = 54001, 54002, 54000


class Store:
    """Ten entries of the same size that a pod has written and nobody used for long, and their janitor."""

    def __init__(self, home: Path):
        self.root, self._home = home / "store", home
        self.root.mkdir()
        self.paths = [self._put(number) for number in range(10)]
        self.size = self.paths[0].stat().st_size
        give(self.root, POD, GROUP)
        (self.root / ".janitor").mkdir()
        self.root.chmod(0o2770)
        give(self.root / ".janitor", JANITOR, GROUP)
        self.lease, self.totals = StoreLease(self.root), Totals()
        self._indexes: list[Index] = []

    @property
    def base(self) -> Path:
        return self.root / "ns"

    @property
    def left(self) -> list[int]:
        return [number for number, path in enumerate(self.paths) if path.exists()]

    @property
    def sequence(self) -> int:
        report = read_report(self.root)
        assert report is not None
        return report.sequence

    def keeper(self, pace: Pace | None = None, **limits: Any) -> Keeper:
        """As the service makes one at its start and after an error: the lease and the totals stay."""
        if self.lease.token is None:
            self.lease.acquire()
        self._indexes.append(Index(self._home / f"index{len(self._indexes)}"))
        bounds = Limits(**{"capacity": 1 << 40, "grace": 100.0, "rate": 1e9, **limits})
        pace = pace or Pace(1e9, Event())
        return Keeper(self.root, bounds, self.lease, self._indexes[-1], pace, self.totals)

    def _put(self, number: int) -> Path:
        store, key = FileStore(self.root, "ns", fsync=False), f"{number:064x}"
        store.save(key, torch.zeros(64, 16), fingerprint="f" * 64, modality="image", metadata={})
        os.utime(store.path(key), (time.time() - 1000 + number,) * 2)
        return store.path(key)

    def close(self) -> None:
        for index in self._indexes:
            index.close()


@pytest.fixture
def store() -> Iterator[Store]:
    with TemporaryDirectory() as home:  # not pytest's own, which is closed to other users
        os.chown(home, JANITOR, GROUP)
        made = Store(Path(home))
        yield made
        made.close()


def test_an_entry_that_is_closed_to_the_janitor_keeps_it_from_no_other(store: Store) -> None:
    store.paths[0].parent.chmod(0)
    store.paths[1].parent.chmod(0o550)
    store.paths[2].chmod(0)
    with as_user(JANITOR, GROUP):
        keeper = store.keeper(capacity=8 * store.size, scrub=1 << 20)
        keeper.cycle()
        while keeper.recheck():
            pass
        keeper.cycle()
    store.paths[0].parent.chmod(0o2770)
    assert store.left[:2] == [0, 1]
    assert len(store.left) <= 8
    assert store.totals.refused
    with as_user(JANITOR, GROUP):
        keeper.cycle()
    assert keeper.usage is not None
    assert keeper.usage.bytes == len(store.left) * store.size, "what was closed is counted once it is open"


def test_a_closed_namespace_of_the_store_ends_the_look_and_is_not_taken_for_empty(store: Store) -> None:
    store.base.chmod(0o440)
    with as_user(JANITOR, GROUP):
        for _ in range(2):
            with pytest.raises(PermissionError):
                store.keeper().cycle()
    assert read_report(store.root) is None
    store.base.chmod(0o2770)
    with as_user(JANITOR, GROUP):
        keeper = store.keeper()
        keeper.cycle()
    report = read_report(store.root)
    assert report is not None
    assert report.used == 10 * store.size
    store.base.chmod(0)
    with as_user(JANITOR, GROUP), pytest.raises(PermissionError):
        keeper.cycle()


def test_a_directory_that_is_closed_and_somebody_elses_is_left_alone(store: Store) -> None:
    """A volume's lost+found."""
    (store.root / "lost+found").mkdir(mode=0o700)
    os.chown(store.root / "lost+found", 0, 0)
    with as_user(JANITOR, GROUP):
        keeper = store.keeper()
        keeper.cycle()
        keeper.cycle()
    assert keeper.usage is not None
    assert keeper.usage.entries == 10


def test_reports_go_on_growing_after_an_error_so_that_writers_heed_them(store: Store) -> None:
    with as_user(JANITOR, GROUP):
        first = store.keeper()
        first.cycle()
        first.cycle()
        before = store.sequence
        store.keeper().cycle()  # under the same token
    assert store.sequence > before


def test_a_lease_taken_while_the_janitor_waits_still_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "LEASES_SECONDS", 0.05)
    reader = LeaseTable(store.base, 60)

    class Slow(Pace):
        """After two deletions it waits, and meanwhile a reader leases what is next."""

        taken = 0

        def take(self, operations: int = 1) -> None:
            self.taken += 1
            if self.taken == 3:
                for path in store.paths[2:4]:
                    assert reader.take(path.parent.name)
                time.sleep(0.1)

    store.keeper(Slow(1e9, Event()), capacity=6 * store.size).cycle()
    assert store.left[:2] == [2, 3]
    assert len(store.left) < 6
