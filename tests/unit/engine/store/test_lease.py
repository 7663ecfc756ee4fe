import os
import time
from pathlib import Path

import pytest

from epd_engine.ec_store.janitor import lease as lease_module
from epd_engine.ec_store.janitor.lease import LeaseHeld, LeaseLost, StoreLease


def names(root: Path) -> list[str]:
    return sorted(p.name for p in (root / ".janitor").iterdir() if p.name.startswith("lease"))


def grow_old(root: Path, seconds: float) -> None:
    for path in (root / ".janitor").glob("lease.*"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_there_is_one_janitor(tmp_path: Path) -> None:
    first, second = StoreLease(tmp_path), StoreLease(tmp_path)
    first.acquire()
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} on .* is the janitor"):
        second.acquire()
    first.check()


def test_what_is_released_is_taken_at_once_with_a_higher_token(tmp_path: Path) -> None:
    first, second = StoreLease(tmp_path), StoreLease(tmp_path)
    token = first.acquire()
    first.release()
    assert second.acquire() > token
    assert names(tmp_path) == [f"lease.{second.token}"]
    with pytest.raises(LeaseLost):
        first.guard()


def test_a_dead_holder_is_replaced_once_its_lease_is_too_old(tmp_path: Path) -> None:
    dead, heir = StoreLease(tmp_path), StoreLease(tmp_path)
    dead.acquire()
    grow_old(tmp_path, 14)
    with pytest.raises(LeaseHeld):
        heir.acquire()
    grow_old(tmp_path, 16)
    heir.acquire()
    with pytest.raises(LeaseLost, match="took over"):
        dead.check()
    heir.check()


def test_a_holder_that_slept_deletes_nothing_though_nobody_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = StoreLease(tmp_path)
    lease.acquire()
    clock = lease_module._clock
    monkeypatch.setattr(lease_module, "_clock", lambda: clock() + 12)
    with pytest.raises(LeaseLost, match="not renewed in time"):
        lease.guard()
    monkeypatch.undo()
    with pytest.raises(LeaseLost):
        lease.check()


def test_a_holder_renews_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = StoreLease(tmp_path)
    lease.acquire()
    start = lease_module._clock()
    for passed in range(0, 100, 8):
        monkeypatch.setattr(lease_module, "_clock", lambda passed=passed: start + passed)
        grow_old(tmp_path, 8)
        lease.check()
        if passed:
            assert time.time() - (tmp_path / ".janitor" / f"lease.{lease.token}").stat().st_mtime < 5


def test_of_two_that_start_at_one_moment_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loser looked before the winner was there, and made its file after."""
    first, second = StoreLease(tmp_path), StoreLease(tmp_path)
    first.acquire()
    look = second._highest
    answers = iter([None])
    monkeypatch.setattr(second, "_highest", lambda: next(answers, look()))
    monkeypatch.setattr(lease_module.time, "time", lambda: float(first.token or 0) - 1)
    with pytest.raises(LeaseHeld, match="at this moment"):
        second.acquire()
    monkeypatch.setattr(lease_module.time, "time", lambda: float(first.token or 0) - 5)
    answers = iter([None])
    with pytest.raises(LeaseHeld, match="at this moment"):
        second.acquire()
    assert names(tmp_path) == [f"lease.{first.token}"]
    first.check()


def test_tokens_grow_even_where_the_directory_was_removed(tmp_path: Path) -> None:
    lease = StoreLease(tmp_path)
    token = lease.acquire()
    (tmp_path / ".janitor" / f"lease.{token}").unlink()
    lease._renewed -= 5
    with pytest.raises(LeaseLost, match="removed"):
        lease.check()
    assert lease.acquire() >= token


def test_files_that_are_no_leases_are_no_leases(tmp_path: Path) -> None:
    (tmp_path / ".janitor").mkdir()
    for name in ("lease.x", "lease.", "lease.12.torn", "lease.-1", "report", "lease.1" + "0" * 30):
        (tmp_path / ".janitor" / name).write_text("{")
    StoreLease(tmp_path).acquire()
