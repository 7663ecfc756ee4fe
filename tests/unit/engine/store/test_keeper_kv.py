"""KV between prefill and decode in a store under a janitor: counted, cleared by age, never an entry."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from epd_engine.ec_store.janitor.index import Index
from epd_engine.ec_store.janitor.keeper import Keeper
from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.kv_area import KV_DIRECTORY, PULLED

NAMESPACE = "f" * 16


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    root = tmp_path / "store"
    (root / KV_DIRECTORY / NAMESPACE).mkdir(parents=True)
    lease, index = StoreLease(root), Index(tmp_path / "index.sqlite")
    lease.acquire()
    limits = Limits(capacity=1 << 40, grace=100, rate=1e9, kv_ttl=1000)
    yield Keeper(root, limits, lease, index, Pace(1e9, Event()))
    index.close()


def put(root: Path, name: str, *, age: float, namespace: str = NAMESPACE) -> Path:
    directory = root / KV_DIRECTORY / namespace / name
    directory.mkdir(parents=True)
    (directory / "000000-000002.safetensors").write_bytes(bytes(5000))
    os.utime(directory, (time.time() - age,) * 2)
    return directory


def test_what_is_old_goes_and_what_is_young_counts(keeper: Keeper) -> None:
    root = keeper._root
    old = [put(root, "a" * 64, age=1100), put(root, "b" * 64 + PULLED, age=1100)]
    young = [put(root, "c" * 64, age=900), put(root, "d" * 64 + PULLED, age=10)]
    keeper.cycle()
    assert [path.exists() for path in old + young] == [False, False, True, True]
    assert keeper.usage is not None
    assert (keeper.usage.bytes, keeper.usage.kv_bytes, keeper.usage.kv_transfers) == (10000, 10000, 2)
    assert keeper.usage.entries == 0
    assert keeper.totals.removed["kv"] == 2


def test_foreign_names_and_links_are_left_alone(keeper: Keeper, tmp_path: Path) -> None:
    root, outside = keeper._root, tmp_path / "outside"
    names = [put(root, "notes", age=9999), put(root, "a" * 64, age=9999, namespace="other")]
    (outside / ("e" * 64)).mkdir(parents=True)
    os.utime(outside / ("e" * 64), (1, 1))
    (root / KV_DIRECTORY / ("e" * 16)).symlink_to(outside)
    (root / KV_DIRECTORY / NAMESPACE / ("f" * 64)).symlink_to(outside)
    keeper.cycle()
    assert all(path.exists() for path in names)
    assert (outside / ("e" * 64)).exists()


def test_a_dry_run_deletes_nothing(keeper: Keeper) -> None:
    old = put(keeper._root, "a" * 64, age=1100)
    keeper.cycle(dry_run=True)
    assert old.exists()
