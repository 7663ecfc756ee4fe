"""`ECTieredConnector`: memory in front of files."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_engine.ec_transfer import shared_memory_connector, store_connector
from epd_engine.ec_transfer.config import ECConfigError
from epd_engine.ec_transfer.tiered_connector import ECTieredConnector
from tests.support.connector_pairs import Instance, encoded, picture
from tests.support.engine_objects import IDENTITY
from tests.support.mounts import small_tmpfs

ENTRY = 256


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "memory", 16 << 20) as path:
        yield path


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_connector, "_UPKEEP_SECONDS", 0.0)
    monkeypatch.setattr(store_connector, "_ACKNOWLEDGEMENTS_SECONDS", 0.0)


def instance(role: str, tmpfs: Path, volume: Path, capacity: int = 1 << 20, **extra: Any) -> Instance:
    tiers = {
        "memory": {"path": str(tmpfs), "capacity": capacity},
        "storage": {"shared_storage_path": str(volume), "fsync": False},
    }
    return Instance("ECTieredConnector", role, {**tiers, **extra})


def only_memory(memory: Path) -> Instance:
    return Instance("ECSharedMemoryConnector", "ec_consumer", {"path": str(memory), "capacity": 1 << 20})


def only_files(volume: Path) -> Instance:
    return Instance("ECSharedStorageConnector", "ec_consumer", {"shared_storage_path": str(volume)})


def entry(volume: Path, key: str) -> Path:
    return volume / IDENTITY.fingerprint[:16] / key


def lose_memory(memory: Path) -> None:
    for arena in memory.rglob("*.arena"):
        arena.unlink()


def test_what_is_written_through_is_in_both_tiers_when_it_is_answered(memory: Path, volume: Path) -> None:
    encoder, a = instance("ec_producer", memory, volume), picture("a")
    assert encoder.publish(a).finished_sending == {a.mm_hash}
    for reader in (only_memory(memory), only_files(volume), instance("ec_consumer", memory, volume)):
        assert reader.has(a)
        assert reader.load(a).finished_recving == {a.mm_hash}
        assert torch.equal(reader.cache[a.mm_hash], encoded(a.mm_hash))


def test_a_miss_in_memory_is_no_miss_and_is_promoted(memory: Path, volume: Path) -> None:
    encoder, a = instance("ec_producer", memory, volume), picture("a")
    encoder.publish(a)
    encoder.close()
    lose_memory(memory)
    pd = instance("ec_consumer", memory, volume)
    assert pd.has(a)
    output = pd.load(a)
    assert output.finished_recving == {a.mm_hash}
    assert output.finished_sending == set(), "a promotion is nobody's save"
    shutil.rmtree(entry(volume, a.mm_hash))
    other = instance("ec_consumer", memory, volume)
    assert other.has(a)
    assert other.load(a).finished_recving == {a.mm_hash}
    assert torch.equal(other.cache[a.mm_hash], encoded(a.mm_hash))


def test_files_stand_in_for_memory_that_goes_between_look_up_and_load(memory: Path, volume: Path) -> None:
    encoder, pd, a = (
        instance("ec_producer", memory, volume),
        instance("ec_consumer", memory, volume),
        picture("a"),
    )
    encoder.publish(a)
    assert pd.has(a)
    lose_memory(memory)
    output = pd.load(a)
    assert output.finished_recving == {a.mm_hash}
    assert output.failed_recving == {}


def test_an_entry_that_both_tiers_lost_is_a_failure_with_both_reasons(memory: Path, volume: Path) -> None:
    encoder, pd, a = (
        instance("ec_producer", memory, volume),
        instance("ec_consumer", memory, volume),
        picture("a"),
    )
    encoder.publish(a)
    assert pd.has(a)
    lose_memory(memory)
    shutil.rmtree(entry(volume, a.mm_hash))
    output = pd.load(a)
    assert set(output.failed_recving) == {a.mm_hash}
    assert a.mm_hash not in pd.cache


def test_memory_without_room_leaves_it_to_the_files(memory: Path, volume: Path) -> None:
    encoder = instance("ec_producer", memory, volume, capacity=ENTRY)
    a, b = picture("a"), picture("b")
    assert encoder.publish(a).finished_sending == {a.mm_hash}
    assert encoder.publish(b).finished_sending == {b.mm_hash}, "a is not read yet, so b has no room"
    pd = instance("ec_consumer", memory, volume, capacity=ENTRY)
    assert pd.has(a)
    assert pd.has(b)
    assert pd.load(a, b).finished_recving == {a.mm_hash, b.mm_hash}


def test_a_volume_that_refuses_leaves_it_to_memory(memory: Path, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "full", 1 << 20) as volume:
        (volume / "ballast").write_bytes(bytes((1 << 20) - 8192))
        encoder = instance("ec_producer", memory, volume)
        (volume / "ballast2").write_bytes(bytes(8192))
        a = picture("a")
        assert encoder.publish(a).finished_sending == {a.mm_hash}
        assert only_memory(memory).has(a)
        encoder.close()


def test_where_both_refuse_the_reasons_are_given(memory: Path, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "full", 1 << 20) as volume:
        encoder = instance("ec_producer", memory, volume, capacity=ENTRY)
        a, b = picture("a"), picture("b")
        encoder.publish(a)
        with pytest.raises(OSError, match="No space"):
            (volume / "ballast").write_bytes(bytes(2 << 20))
        output = encoder.publish(b)
        assert output.finished_sending == set()
        assert "No space" in output.failed_sending[b.mm_hash]
        assert "share" in output.failed_sending[b.mm_hash]
        encoder.close()


def test_write_back_answers_from_memory_and_reaches_the_files_later(memory: Path, volume: Path) -> None:
    encoder, a = instance("ec_producer", memory, volume, write="back"), picture("a")
    assert encoder.publish(a).finished_sending == {a.mm_hash}
    encoder.close()  # finishes what is queued
    assert entry(volume, a.mm_hash).is_dir()


def test_what_is_not_written_back_yet_stays_in_memory(memory: Path, volume: Path) -> None:
    encoder = instance("ec_producer", memory, volume, write="back", capacity=ENTRY)
    assert isinstance(encoder.scheduler, ECTieredConnector)
    assert encoder.scheduler.memory.manager is not None
    a = picture("a")
    encoder.publish(a)
    held = encoder.scheduler.memory.manager.get(a.mm_hash)
    assert held is not None
    if held.references:  # the files were not faster than this line
        assert not encoder.scheduler.memory.manager._freeable
    encoder.worker.storage.wait_for_save()  # type: ignore[attr-defined]
    encoder.step()
    assert held.references == set()


def test_write_back_waits_for_the_files_where_memory_has_failed(memory: Path, volume: Path) -> None:
    encoder = instance("ec_producer", memory, volume, write="back", capacity=ENTRY)
    a, b = picture("a"), picture("b")
    encoder.publish(a)
    assert encoder.publish(b).finished_sending == {b.mm_hash}
    assert entry(volume, b.mm_hash).is_dir()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"write": "around"}, "write"),
        ({"memory": {"size": 1}}, "'size'"),
        ({"storage": {"path": "/x"}}, "'path'"),
        ({"disk": {}}, "'disk'"),
        ({"memory": []}, "memory"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_by_name(
    memory: Path, volume: Path, extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(ECConfigError, match=words):
        instance("ec_producer", memory, volume, **extra)
