import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd_engine.ec_store.credit import (
    PRESENCE_SECONDS,
    Report,
    WriterCredit,
    credit_per_writer,
    live_writers,
    read_report,
    someone_new_or_waiting,
)
from epd_engine.ec_store.errors import StoreUnavailable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".janitor").mkdir()
    return tmp_path


def publish(
    root: Path,
    used: int = 0,
    *,
    number: tuple[int, int] = (1, 1),
    budget: int = 1000,
    credit: int | None = None,
) -> Report:
    writers, _ = live_writers(root, time.time())
    if credit is None:
        credit = credit_per_writer(budget, used, len(writers))
    report = Report(*number, time.time(), budget, used, 0, credit, writers)
    report.publish(root)
    return report


def test_without_a_janitor_there_is_no_limit_and_no_trace(tmp_path: Path) -> None:
    credit = WriterCredit(tmp_path)
    assert credit.take(1 << 40)
    credit.settle(1 << 40, written=True)
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_read_as_it_was_published(root: Path) -> None:
    assert read_report(root) is None
    report = publish(root, 10)
    assert read_report(root) == report


def test_a_writer_stops_at_its_credit_and_goes_on_with_the_report_after_the_next(root: Path) -> None:
    credit = WriterCredit(root)
    publish(root)
    assert credit.take(100)  # not counted yet: one entry
    credit.settle(100, written=True)
    assert not credit.take(1)
    publish(root, 100, number=(1, 2))  # counted, and 900 // 4 = 225 to write
    assert credit.take(125)
    credit.settle(125, written=True)
    assert not credit.take(1), "what the look may not have seen is charged still"
    publish(root, 225, number=(1, 3), credit=225)
    assert credit.take(100), "the first entry is certainly in the numbers now"


def test_what_was_not_written_is_not_charged(root: Path) -> None:
    credit = WriterCredit(root)
    publish(root)
    for _ in range(5):
        assert credit.take(100)
        credit.settle(100, written=False)


def test_a_writer_with_nothing_charged_may_write_one_entry_while_the_store_is_below_its_budget(
    root: Path,
) -> None:
    credit = WriterCredit(root)
    publish(root, 990)
    assert credit.take(500)
    assert not credit.take(1)


def test_nothing_goes_into_a_full_store_and_the_error_says_why(root: Path) -> None:
    credit = WriterCredit(root, wait_seconds=0.1)
    publish(root, 1000)
    with pytest.raises(
        StoreUnavailable, match=r"full: 1000 of 1000 bytes; the janitor's last report is \d+ s old"
    ):
        credit.wait(1)


def test_an_entry_larger_than_the_budget_is_refused_at_once(root: Path) -> None:
    publish(root)
    with pytest.raises(StoreUnavailable, match="larger than the EC store's budget of 1000"):
        WriterCredit(root, wait_seconds=100).wait(1001)


def test_a_writer_that_waits_calls_the_janitor_and_goes_on_with_its_report(root: Path) -> None:
    publish(root, 1000)
    credit = WriterCredit(root, wait_seconds=60)
    waiting = threading.Thread(target=credit.wait, args=(10,))
    waiting.start()
    while not live_writers(root, time.time())[1]:
        time.sleep(0.01)
    publish(root, 500, number=(1, 2))
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_new_writer_is_noticed(root: Path) -> None:
    publish(root)
    assert not someone_new_or_waiting(root, ())
    credit = WriterCredit(root)
    credit.take(1)
    assert someone_new_or_waiting(root, ())
    assert not someone_new_or_waiting(root, (credit.id,))


def test_a_writer_that_is_gone_is_counted_until_its_file_is_too_old(root: Path) -> None:
    publish(root)
    credit = WriterCredit(root)
    credit.take(1)
    assert live_writers(root, time.time()) == ((credit.id,), False)
    assert live_writers(root, time.time() + PRESENCE_SECONDS + 1) == ((), False)
    assert os.listdir(root / ".janitor" / "writers") == []


def test_a_report_of_a_janitor_that_was_replaced_changes_nothing(root: Path) -> None:
    credit = WriterCredit(root)
    publish(root, 1000, number=(7, 1))
    assert not credit.take(1)
    publish(root, 0, number=(6, 99))
    assert not credit.take(1)
    publish(root, 0, number=(8, 1))
    assert credit.take(1)


def test_a_writer_that_cannot_read_the_first_report_writes_nothing(root: Path) -> None:
    report = root / ".janitor" / "report"
    report.symlink_to(report)  # refused to root as well
    credit = WriterCredit(root)
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        credit.take(1)
    report.unlink()
    assert credit.take(1), "no report: no janitor"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"token": null}', '"x"', "\xff"])
def test_a_report_that_is_none_changes_nothing(root: Path, text: str) -> None:
    credit = WriterCredit(root)
    publish(root, 1000)
    assert not credit.take(1)
    (root / ".janitor" / "report").write_text(text, "latin-1")
    assert not credit.take(1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 3), st.integers(1, 40)),
        st.tuples(st.just("look"), st.just(0), st.just(0)),
        st.tuples(st.just("publish"), st.integers(0, 200), st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    min_size=50,
    max_size=250,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_the_budget_is_exceeded_by_one_entry_a_writer_at_most(actions: list[tuple[str, int, int]]) -> None:
    """Looks take time: what is written between a look and its report is in no number. The janitor evicts
    an arbitrary amount, and is replaced at times; writers come one by one."""
    budget, largest = 1500, 40
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / ".janitor").mkdir()
        writers: dict[int, WriterCredit] = {}
        disk = seen = 0
        token, sequence = 1, 1
        counted = live_writers(root, time.time())[0]
        Report(token, 1, 0.0, budget, 0, 0, credit_per_writer(budget, 0, 0), ()).publish(root)
        for action, a, b in actions:
            if action == "save":
                writer = writers.setdefault(a, WriterCredit(root))
                if writer.take(b):
                    disk += b
                    writer.settle(b, written=True)
            elif action == "look":
                counted, seen = live_writers(root, time.time())[0], disk
            elif action == "publish":
                evicted = min(a, seen)
                disk, seen = disk - evicted, seen - evicted
                sequence += 1
                credit = credit_per_writer(budget, seen, len(counted))
                Report(token, sequence, 0.0, budget, seen, 0, credit, counted).publish(root)
                counted, seen = live_writers(root, time.time())[0], disk  # the next look begins after it
            else:
                token, sequence = token + 1, 0
                counted, seen = live_writers(root, time.time())[0], disk
            assert disk <= budget + len(writers) * largest
