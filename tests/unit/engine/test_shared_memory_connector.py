"""`ECSharedMemoryConnector` between producers and consumers on one tmpfs."""

import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_engine.ec_store.leases import live_leases
from epd_engine.ec_transfer import shared_memory_connector, store_connector
from epd_engine.ec_transfer.base import ECConnectorOutput
from epd_engine.ec_transfer.config import ECConfigError
from epd_engine.ec_transfer.shared_memory_connector import ECSharedMemoryConnector
from tests.support.connector_pairs import Instance, encoded, picture
from tests.support.engine_objects import IDENTITY, item, request
from tests.support.mounts import small_tmpfs

NAME = "ECSharedMemoryConnector"
ENTRY = 256  # bytes that an item of 4 embeddings takes, rounded


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "memory", 16 << 20) as path:
        yield path


@pytest.fixture(autouse=True)
def always_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_connector, "_UPKEEP_SECONDS", 0.0)
    monkeypatch.setattr(store_connector, "_ACKNOWLEDGEMENTS_SECONDS", 0.0)


def producer(memory: Path, **extra: Any) -> Instance:
    return Instance(NAME, "ec_producer", {"path": str(memory), "capacity": 1 << 20, **extra})


def consumer(memory: Path, **extra: Any) -> Instance:
    return Instance(NAME, "ec_consumer", {"path": str(memory), "capacity": 1 << 20, **extra})


def base(memory: Path) -> Path:
    return memory / IDENTITY.fingerprint[:16]


def test_what_one_publishes_every_other_loads(memory: Path) -> None:
    encoder, pds = producer(memory), [consumer(memory), consumer(memory)]
    a = picture("a")
    assert not pds[0].has(a)
    assert encoder.publish(a).finished_sending == {a.mm_hash}
    for pd in pds:
        assert pd.has(a)
        assert pd.load(a).finished_recving == {a.mm_hash}
        assert torch.equal(pd.cache[a.mm_hash], encoded(a.mm_hash))


def test_a_second_producer_finds_what_the_first_has_published(memory: Path) -> None:
    first, second = producer(memory), producer(memory)
    first.publish(picture("a"))
    assert second.has(picture("a"))
    second.publish(picture("b"))
    assert first.has(picture("b"))


def test_an_entry_waits_for_its_reader_and_its_acknowledgement_frees_it(memory: Path) -> None:
    encoder, pd = producer(memory), consumer(memory)
    a = picture("a")
    encoder.publish(a)
    assert live_leases(base(memory)) == {a.mm_hash}, "for the reader that is on its way"
    assert pd.has(a)
    output = pd.load(a)
    assert output.finished_recving == {a.mm_hash}
    assert encoder.step().acknowledged == [a.mm_hash]
    assert live_leases(base(memory)) == set()


def test_a_reader_that_needs_no_load_frees_it_too(memory: Path) -> None:
    encoder, pd = producer(memory), consumer(memory)
    a = picture("a")
    encoder.publish(a)
    pd.scheduler.acknowledge(a)
    assert encoder.step().acknowledged == [a.mm_hash]
    assert live_leases(base(memory)) == set()


def test_room_is_made_from_what_was_used_least_recently(memory: Path) -> None:
    encoder, pd = producer(memory, capacity=3 * ENTRY), consumer(memory)
    pictures = {name: picture(name) for name in "abcd"}
    for name in "abc":
        encoder.publish(pictures[name])
        assert pd.has(pictures[name])
        pd.load(pictures[name])
    assert pd.has(pictures["a"])
    pd.load(pictures["a"])  # used again, after b and c
    encoder.step()
    encoder.publish(pictures["d"])
    assert [pd.has(pictures[name]) for name in "abcd"] == [True, False, True, True]


def test_an_entry_that_nobody_has_read_yet_is_not_freed_for_another(memory: Path) -> None:
    encoder, pd = producer(memory, capacity=2 * ENTRY), consumer(memory)
    a, b, c = picture("a"), picture("b"), picture("c")
    encoder.publish(a)
    encoder.publish(b)
    asked = request("r", 0, [c])
    assert not encoder.scheduler.ensure_cache_available(asked, 0), "it waits"
    assert pd.has(a)
    pd.load(a)
    encoder.step()
    assert encoder.scheduler.ensure_cache_available(asked, 0)
    assert encoder.publish(c).finished_sending == {c.mm_hash}
    assert pd.has(b)
    assert not pd.has(a)


def test_the_lease_of_a_reader_that_died_runs_out(memory: Path) -> None:
    encoder, pd = producer(memory, capacity=ENTRY, lease_seconds=0.2), consumer(memory, lease_seconds=0.2)
    a, b = picture("a"), picture("b")
    encoder.publish(a)
    assert pd.has(a)  # and nothing more is heard of it
    asked = request("r", 0, [b])
    assert not encoder.scheduler.ensure_cache_available(asked, 0)
    time.sleep(0.25)
    assert encoder.publish(b).finished_sending == {b.mm_hash}


def test_a_load_whose_entry_has_gone_is_reported_and_gives_its_lease_back(memory: Path) -> None:
    encoder, pd = producer(memory), consumer(memory)
    a = picture("a")
    encoder.publish(a)
    assert pd.has(a)
    encoder.close()
    output = pd.load(a)
    assert a.mm_hash in output.failed_recving
    assert a.mm_hash not in pd.cache
    assert live_leases(base(memory)) == set()


def test_producers_share_the_capacity_evenly_as_they_come_and_go(memory: Path) -> None:
    first = producer(memory, capacity=4 * ENTRY)
    names = [picture(name) for name in "abcd"]
    pd = consumer(memory)
    for one in names:
        first.publish(one)
        assert pd.has(one)
        pd.load(one)
    first.step()
    second = producer(memory, capacity=4 * ENTRY)
    first.step()
    assert [pd.has(one) for one in names] == [True, True, False, False]
    second.step()
    manager = second.scheduler.manager  # type: ignore[attr-defined]
    assert manager.capacity == 2 * ENTRY
    first.close()
    second.step()
    assert manager.capacity == 4 * ENTRY


def test_a_dead_producers_memory_is_swept_by_another(memory: Path) -> None:
    first, second = producer(memory), producer(memory)
    first.publish(picture("a"))
    fcntl.flock(first.worker._writer._descriptor, fcntl.LOCK_UN)  # type: ignore[attr-defined]  # as at its end
    second.step()
    assert len(list(base(memory).glob("*.arena"))) == 1
    assert not second.has(picture("a"))


def test_an_item_that_fits_nowhere_is_refused_with_the_numbers(memory: Path) -> None:
    encoder = producer(memory, capacity=4096)
    large = item("large", 0, 1000, pixels=True)
    reason = encoder.scheduler.refusal(large)
    assert reason is not None
    assert "32256" in reason
    assert "4096" in reason
    assert encoder.scheduler.refusal(picture("a")) is None


def test_an_item_beyond_this_producers_share_fails_and_is_not_waited_for(memory: Path) -> None:
    encoder = producer(memory, capacity=2 * ENTRY)
    producer(memory, capacity=2 * ENTRY)
    encoder.step()
    two = item("two", 0, 8, pixels=True)
    output = encoder.publish(two)
    assert "share" in output.failed_sending[two.mm_hash]


def test_what_was_not_encoded_after_all_gives_its_room_back(memory: Path) -> None:
    encoder = producer(memory, capacity=ENTRY)
    a, b = picture("a"), picture("b")
    asked = request("r", 0, [a])
    encoder.scheduler.update_state_after_alloc(asked, 0, load=False)
    output = encoder.step()
    assert a.mm_hash in output.failed_sending
    assert encoder.publish(b).finished_sending == {b.mm_hash}


def test_a_step_that_could_not_be_executed_gives_its_room_back(memory: Path) -> None:
    encoder = producer(memory, capacity=ENTRY)
    a, b = picture("a"), picture("b")
    encoder.scheduler.update_state_after_alloc(request("r", 0, [a]), 0, load=False)
    encoder.scheduler.build_connector_meta()
    encoder.scheduler.update_connector_output(ECConnectorOutput(failed_sending={a.mm_hash: "exploded"}))
    assert encoder.publish(b).finished_sending == {b.mm_hash}


def test_a_damaged_entry_is_written_anew(memory: Path) -> None:
    encoder, pd = producer(memory, verify="always"), consumer(memory, verify="always")
    a = picture("a")
    encoder.publish(a)
    (path,) = base(memory).glob("*.arena")
    data = path.read_bytes()
    place = data.index(encoded(a.mm_hash).numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\xff\xff")
    assert not encoder.has(a), "a producer reads the payload before it says yes"
    assert encoder.publish(a).finished_sending == {a.mm_hash}
    assert pd.has(a)
    pd.load(a)
    assert torch.equal(pd.cache[a.mm_hash], encoded(a.mm_hash))


def test_ec_both_computes_on_where_the_store_has_no_room(memory: Path) -> None:
    both = Instance(NAME, "ec_both", {"path": str(memory), "capacity": ENTRY})
    both.publish(picture("a"))
    assert both.has(picture("a"))  # leased
    asked = request("r", 0, [picture("b")])
    assert both.scheduler.ensure_cache_available(asked, 0)
    output = both.publish(picture("b"))
    assert set(output.failed_sending) == {picture("b").mm_hash}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "'path' is needed"),
        ({"path": "/x", "size": 1}, "unknown|does not know"),
        ({"path": "/x", "capacity": 0}, "capacity"),
        ({"path": "/x", "capacity": "1Gi"}, "capacity"),
        ({"path": "/x", "lease_seconds": 0}, "lease_seconds"),
        ({"path": "/x", "verify": "maybe"}, "verify"),
        ({"path": "/x", "verify": True}, "verify"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_by_name(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ECConfigError, match=words):
        Instance(NAME, "ec_producer", extra)


def test_a_directory_on_a_disk_or_too_small_a_mount_is_refused_at_start(memory: Path, tmp_path: Path) -> None:
    with pytest.raises(ECConfigError, match="needs a tmpfs"):
        producer(tmp_path)
    with pytest.raises(ECConfigError, match="lower `capacity`"):
        producer(memory, capacity=1 << 30)


def test_without_a_capacity_nine_tenths_of_the_mount_are_taken(memory: Path) -> None:
    encoder = Instance(NAME, "ec_producer", {"path": str(memory)})
    assert isinstance(encoder.scheduler, ECSharedMemoryConnector)
    encoder.step()
    assert encoder.scheduler.manager is not None
    assert encoder.scheduler.manager.capacity == int(0.9 * (16 << 20))


@pytest.mark.parametrize(("role", "refuses"), [("ec_producer", True), ("ec_both", False)])
def test_an_item_larger_than_the_store_is_refused_by_who_does_nothing_but_publish(
    memory: Path, role: str, refuses: bool
) -> None:
    instance = Instance(NAME, role, {"path": str(memory), "capacity": ENTRY})
    huge = item("huge", 0, 100, pixels=True)
    assert bool(instance.scheduler.refusal(huge)) == refuses
    assert huge.mm_hash in instance.publish(huge).failed_sending
