import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from epd_engine.ec_store.credit import read_report
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.janitor.index import Index
from epd_engine.ec_store.janitor.keeper import Keeper
from epd_engine.ec_store.janitor.lease import LeaseLost, StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.leases import LeaseTable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def keep(root: Path, tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Makes the janitor of `root` under given limits; asked again, the next one with the same lease."""
    lease, made = StoreLease(root), list[Index]()
    lease.acquire()

    def make(**limits: Any) -> Keeper:
        made.append(Index(tmp_path / f"index{len(made)}.sqlite"))
        bounds = Limits(**{"capacity": 1 << 40, "grace": 100.0, "rate": 1e9, **limits})
        return Keeper(root, bounds, lease, made[-1], Pace(1e9, Event()))

    yield make
    for index in made:
        index.close()


def put(root: Path, number: int, *, age: float = 1000, namespace: str = "ns", rows: int = 64) -> Path:
    """An entry used `age` seconds ago."""
    store = FileStore(root, namespace, fsync=False)
    key = f"{number:064x}"
    store.save(key, torch.zeros(rows, 16), fingerprint="f" * 64, modality="image", metadata={})
    make_old(store.path(key), age)
    return store.path(key)


def make_old(path: Path, age: float) -> None:
    os.utime(path, (time.time() - age,) * 2)


def left(paths: list[Path]) -> list[int]:
    return [n for n, path in enumerate(paths) if path.exists()]


def test_from_above_the_high_mark_the_least_recently_used_go_down_to_the_low_mark(
    root: Path, keep: Callable[..., Keeper]
) -> None:
    paths = [put(root, n, age=1000 - n) for n in range(10)]
    size = paths[0].stat().st_size
    keep(capacity=12 * size).cycle()
    assert left(paths) == list(range(10)), "10 of 12 is not above nine tenths"
    cleared = keep(capacity=10 * size, high_water=0.9, low_water=0.55).cycle()
    assert left(paths) == [5, 6, 7, 8, 9]
    assert cleared.entries == {"capacity": 5}
    assert not any(path.parent.exists() for path in paths[:5]), "nor do their directories stay"


def test_all_namespaces_and_the_bare_layout_are_one_store(root: Path, keep: Callable[..., Keeper]) -> None:
    paths = [put(root, n, age=1000 - n, namespace=("", "a", "b")[n % 3]) for n in range(9)]
    keep(capacity=9 * paths[0].stat().st_size, high_water=0.5, low_water=0.45).cycle()
    assert left(paths) == [5, 6, 7, 8]


def test_a_touch_saves_an_entry(root: Path, keep: Callable[..., Keeper]) -> None:
    paths = [put(root, n, age=1000 - n) for n in range(4)]
    keeper = keep(capacity=100 * paths[0].stat().st_size, max_entries=4)
    keeper.cycle()
    make_old(paths[0], 500)  # after it was seen
    put(root, 4, age=900)
    keeper.cycle()
    assert left(paths) == [0, 2, 3]


def test_what_was_not_used_for_the_ttl_goes(root: Path, keep: Callable[..., Keeper]) -> None:
    paths = [put(root, n, age=age) for n, age in enumerate((5000, 3000, 900))]
    assert keep(ttl=2000).cycle().entries == {"ttl": 2}
    assert left(paths) == [2]


def test_an_entry_under_a_live_lease_stays(root: Path, keep: Callable[..., Keeper]) -> None:
    paths = [put(root, n, age=1000 - n) for n in range(4)]
    table = LeaseTable(root / "ns", 60)
    assert table.take(f"{0:064x}")
    cleared = keep(max_entries=2).cycle()
    assert left(paths) == [0, 3]
    assert cleared.leased == 1
    table.close()
    keep(max_entries=1).cycle()
    assert left(paths) == [3]


def test_the_grace_time_spares_an_entry_from_all_but_the_high_mark(
    root: Path, keep: Callable[..., Keeper]
) -> None:
    paths = [put(root, n, age=50 - n) for n in range(10)]
    size = paths[0].stat().st_size
    keep(capacity=20 * size, ttl=10, max_entries=2).cycle()
    assert left(paths) == list(range(10))
    cleared = keep(capacity=10 * size, high_water=0.8, low_water=0.2).cycle()
    assert cleared.entries == {"full": 2}
    assert left(paths) == list(range(2, 10))


def test_a_dry_run_deletes_nothing_and_says_what_would_go(root: Path, keep: Callable[..., Keeper]) -> None:
    paths = [put(root, n, age=1000 - n) for n in range(10)]
    keeper = keep(capacity=10 * paths[0].stat().st_size, high_water=0.9, low_water=0.55)
    assert keeper.cycle(dry_run=True, publish=False).entries == {"capacity": 5}
    assert left(paths) == list(range(10))
    assert read_report(root) is None


def test_what_a_dead_writer_left_goes_after_the_grace_time(root: Path, keep: Callable[..., Keeper]) -> None:
    entry = put(root, 0, age=10)
    beside = entry.with_name(".encoder_cache.safetensors.77.abc.tmp")
    alone = root / "ns" / ("1" * 64) / beside.name
    alone.parent.mkdir()
    for path in (beside, alone):
        path.write_bytes(b"x" * 1000)
    keeper = keep()
    keeper.cycle()
    keeper.recheck()
    assert beside.exists()
    assert alone.exists()
    usage = keeper.usage
    assert usage is not None
    assert usage.unfinished_bytes == 1000
    for path in (beside, alone):
        make_old(path, 101)
    keeper.cycle()
    keeper.recheck()  # the end of the round
    keeper.recheck()
    assert not beside.exists()
    assert not alone.exists()
    make_old(alone.parent, 101)
    keeper.cycle()
    assert not alone.parent.exists()
    assert entry.exists()


def test_other_peoples_files_are_left_alone(root: Path, keep: Callable[..., Keeper]) -> None:
    entry = put(root, 0)
    others = [root / "notes.txt", root / "ns" / "README", entry.parent / "mine", root / "ns" / "0" / "x"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        make_old(path, 1e6)
    keeper = keep(ttl=1.0, grace=0.0)
    keeper.cycle()
    keeper.recheck()
    assert not entry.exists()
    assert all(path.exists() for path in others)


def test_a_damaged_entry_goes_to_quarantine_once_it_is_not_young(
    root: Path, keep: Callable[..., Keeper]
) -> None:
    whole, torn, young, foreign = (put(root, n) for n in range(4))
    for path in (torn, young):
        path.write_bytes(path.read_bytes()[:-7])
    make_old(torn, 1000)
    save_file({"ec_cache": torch.zeros(3, 4)}, foreign)
    keeper = keep()
    keeper.cycle()
    keeper.recheck()
    assert [path.exists() for path in (whole, torn, young, foreign)] == [True, False, True, True]
    assert [p.name.split(".")[1:] for p in (root / ".quarantine").iterdir()] == [["ns", torn.parent.name]]
    assert keeper.totals.quarantined == 1
    keeper.cycle()
    assert keeper.usage is not None
    assert keeper.usage.quarantined_entries == 1
    assert keeper.usage.entries == 3


def test_a_scrub_finds_a_flipped_bit(root: Path, keep: Callable[..., Keeper]) -> None:
    path = put(root, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    make_old(path, 1000)
    keeper = keep()
    keeper.cycle()
    keeper.recheck()
    assert path.exists()
    keeper = keep(scrub=1 << 40)
    keeper.cycle()
    keeper.recheck()
    assert not path.exists()


def test_what_comes_and_goes_between_looks_is_noticed(root: Path, keep: Callable[..., Keeper]) -> None:
    keeper = keep()
    counts = []
    paths: list[Path] = []
    for step in range(8):
        if step in (1, 2, 5):
            paths.append(put(root, step, namespace=("ns", "")[step % 2]))
        if step == 6:
            paths[0].unlink()
            paths[0].parent.rmdir()
        keeper.cycle()
        assert keeper.usage is not None
        counts.append(keeper.usage.entries)
    assert counts == [0, 1, 2, 2, 2, 3, 2, 2]
    assert keeper.usage.bytes == sum(path.stat().st_size for path in paths[1:])


def test_an_entry_saved_again_into_a_directory_that_outlived_it_is_noticed(
    root: Path, keep: Callable[..., Keeper]
) -> None:
    path = put(root, 0)
    busy = path.with_name(".encoder_cache.safetensors.1.a.tmp")
    busy.write_bytes(b"")
    keeper = keep(ttl=500.0)
    keeper.cycle()
    assert not path.exists()
    for _ in range(3):
        keeper.cycle()  # the base is left alone now: nothing in it has changed
    busy.rename(path)
    make_old(path, 10)
    keeper.cycle()
    assert keeper.usage is not None
    assert keeper.usage.entries == 1


def test_a_report_says_what_is_left_to_write(root: Path, keep: Callable[..., Keeper]) -> None:
    path = put(root, 0)
    keep(capacity=1 << 20).cycle()
    report = read_report(root)
    assert report is not None
    assert (report.used, report.entries, report.budget) == (path.stat().st_size, 1, 1 << 20)
    assert report.credit == ((1 << 20) - report.used) // 2


def test_who_is_not_the_janitor_any_more_deletes_nothing_and_says_nothing(
    root: Path, keep: Callable[..., Keeper]
) -> None:
    paths = [put(root, n) for n in range(3)]
    keeper = keep(ttl=1.0, grace=0.0)
    for file in (root / ".janitor").glob("lease.*"):
        make_old(file, 60)
    StoreLease(root).acquire()
    with pytest.raises(LeaseLost):
        keeper.cycle()
    assert left(paths) == [0, 1, 2]
    assert read_report(root) is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_eviction_is_lru_against_a_simple_model(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("store")
    ages = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=12, unique=True))
    paths = [put(root, n, age=200 + age, rows=1 + n % 3 * 40) for n, age in enumerate(ages)]
    leased = data.draw(st.sets(st.integers(0, len(ages) - 1)))
    table = LeaseTable(root / "ns", 60)
    for n in leased:
        table.take(f"{n:064x}")
    sizes = [path.stat().st_size for path in paths]
    capacity = data.draw(st.integers(max(sizes), 2 * sum(sizes)))
    used, stay = sum(sizes), set(range(len(ages)))
    if used > int(capacity * 0.9):
        for n in sorted(stay, key=lambda n: -ages[n]):
            if used > int(capacity * 0.8) and n not in leased:
                stay.remove(n)
                used -= sizes[n]
    lease = StoreLease(root)
    lease.acquire()
    index = Index(root / ".janitor" / "index")
    Keeper(root, Limits(capacity=capacity, grace=100, rate=1e9), lease, index, Pace(1e9, Event())).cycle()
    index.close()
    assert set(left(paths)) == stay
