"""Leases as their readers and the sweepers see them."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from epd_engine.ec_store import leases
from epd_engine.ec_store.leases import Acknowledgements, LeaseTable, live_leases, sweep_leases
from tests.support.mounts import small_tmpfs

KEYS = [f"{n:064x}" for n in range(1, 6)]


def test_a_taken_key_is_live_until_it_is_given_back_as_often(tmp_path: Path) -> None:
    table = LeaseTable(tmp_path, 60)
    assert table.take(KEYS[0])
    assert table.take(KEYS[0])
    assert table.take(KEYS[1])
    table.release(KEYS[0], read=False)
    assert live_leases(tmp_path) == {KEYS[0], KEYS[1]}
    table.release(KEYS[0], read=False)
    assert live_leases(tmp_path) == {KEYS[1]}
    assert table.holds(KEYS[1])
    assert not table.holds(KEYS[0])


def test_a_dead_readers_leases_expire_by_themselves(tmp_path: Path) -> None:
    LeaseTable(tmp_path, 0.05).take(KEYS[0])
    assert live_leases(tmp_path) == {KEYS[0]}
    time.sleep(0.06)
    assert live_leases(tmp_path) == set()


def test_a_lease_taken_again_after_it_ran_out_counts_once(tmp_path: Path) -> None:
    table = LeaseTable(tmp_path, 0.05)
    table.take(KEYS[0])
    time.sleep(0.06)
    table.take(KEYS[0])
    table.release(KEYS[0], read=False)
    assert live_leases(tmp_path) == set()


def test_every_reader_counts(tmp_path: Path) -> None:
    one, other = LeaseTable(tmp_path, 60), LeaseTable(tmp_path, 60)
    one.take(KEYS[0])
    other.take(KEYS[0])
    one.release(KEYS[0], read=True)
    assert live_leases(tmp_path) == {KEYS[0]}, "the first of two readers frees nothing for the second"


def test_acknowledgements_are_heard_once_from_each_reader(tmp_path: Path) -> None:
    heard = Acknowledgements(tmp_path)
    one, other = LeaseTable(tmp_path, 60), LeaseTable(tmp_path, 60)
    for table in (one, other):
        table.take(KEYS[0])
        table.release(KEYS[0], read=True)
    assert heard.take() == [KEYS[0], KEYS[0]]
    assert heard.take() == []
    one.release(KEYS[1], read=True)
    assert heard.take() == [KEYS[1]]


def test_a_producer_that_was_long_away_hears_the_last_of_them(tmp_path: Path) -> None:
    heard, table = Acknowledgements(tmp_path), LeaseTable(tmp_path, 60)
    for n in range(leases.RING + 10):
        table.release(f"{n:064x}", read=True)
    assert heard.take() == [f"{n:064x}" for n in range(10, leases.RING + 10)]


def test_a_full_table_grants_no_more_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "ROWS", 4)
    table = LeaseTable(tmp_path, 60)
    assert [table.take(key) for key in KEYS] == [True] * 4 + [False]
    table.release(KEYS[2], read=False)
    assert table.take(KEYS[4])


def test_torn_and_foreign_files_are_no_leases(tmp_path: Path) -> None:
    table = LeaseTable(tmp_path, 60)
    table.take(KEYS[0])
    (tmp_path / leases.DIRECTORY / "short").write_bytes(b"EPDLEAS1")
    (tmp_path / leases.DIRECTORY / "foreign").write_bytes(os.urandom(400_000))
    assert live_leases(tmp_path) == {KEYS[0]}
    assert Acknowledgements(tmp_path).take() == []


def test_a_swept_reader_that_lives_makes_its_file_anew(tmp_path: Path) -> None:
    table = LeaseTable(tmp_path, 60)
    table.take(KEYS[0])
    (file,) = (tmp_path / leases.DIRECTORY).iterdir()
    file.unlink()
    table.take(KEYS[1])
    assert live_leases(tmp_path) == {KEYS[0], KEYS[1]}


def test_only_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    live, dead = LeaseTable(tmp_path, 60), LeaseTable(tmp_path, 0.001)
    live.take(KEYS[0])
    dead.take(KEYS[1])
    time.sleep(0.01)
    old = time.time() - 2 * leases.STALE_SECONDS
    for file in (tmp_path / leases.DIRECTORY).iterdir():
        os.utime(file, (old, old))
    assert sweep_leases(tmp_path) == 1
    assert live_leases(tmp_path) == {KEYS[0]}


def test_where_nothing_can_be_written_nothing_is_granted(tmp_path: Path) -> None:
    (tmp_path / leases.DIRECTORY).write_text("a file where the directory should be")
    assert not LeaseTable(tmp_path, 60).take(KEYS[0])
    assert live_leases(tmp_path) == set()
    assert sweep_leases(tmp_path) == 0


def test_the_file_is_the_groups_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        LeaseTable(tmp_path, 60).take(KEYS[0])
    finally:
        os.umask(before)
    (file,) = (tmp_path / leases.DIRECTORY).iterdir()
    assert file.stat().st_mode & 0o777 == 0o660
    assert (tmp_path / leases.DIRECTORY).stat().st_mode & 0o7777 == 0o2770


def test_a_full_volume_grants_no_lease_that_nobody_else_could_see(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "volume", 128 << 10) as base:  # a lease file is larger
        table = LeaseTable(base, 60)
        assert not table.take(KEYS[0])
        assert not table.holds(KEYS[0])
        assert list((base / leases.DIRECTORY).iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=1m", str(base)], check=True)
        assert table.take(KEYS[0])
        assert live_leases(base) == {KEYS[0]}


def test_a_file_whose_reader_died_as_it_made_it_is_swept(tmp_path: Path) -> None:
    (tmp_path / leases.DIRECTORY).mkdir()
    torn = tmp_path / leases.DIRECTORY / "torn"
    torn.write_bytes(b"EPDLEAS1")
    assert sweep_leases(tmp_path) == 0
    os.utime(torn, (0, 0))
    assert sweep_leases(tmp_path) == 1
    assert not torn.exists()


def test_where_the_leases_cannot_be_listed_everything_counts_as_leased(tmp_path: Path) -> None:
    (tmp_path / leases.DIRECTORY).symlink_to(tmp_path / leases.DIRECTORY)  # refused to root as well
    with pytest.raises(OSError, match="symbolic"):
        live_leases(tmp_path)
    assert KEYS[0] in LeaseTable(tmp_path, 60).everyones()
    assert sweep_leases(tmp_path) == 0
    assert Acknowledgements(tmp_path).take() == []
