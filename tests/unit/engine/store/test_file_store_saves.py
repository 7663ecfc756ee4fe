"""Saves that share their flushes, loads into given buffers, other programs' entries, volumes seen late."""

import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from epd_engine.ec_store import file_batch, file_store
from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, InvalidKey, StoreUnavailable
from epd_engine.ec_store.file_store import SAMPLE_EVERY, FileStore, NewEntry
from epd_engine.ec_store.group_commit import GroupCommit
from tests.support.mounts import small_tmpfs

FINGERPRINT = "f" * 64
CPU = torch.device("cpu")
EXPECTED = Expectation(FINGERPRINT, 6, 8, torch.float32)


def tensor(seed: int = 0, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def entry(seed: int, rows: int = 6) -> NewEntry:
    return NewEntry(f"{seed:064x}", tensor(seed, rows), FINGERPRINT, "image", {})


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, "ns", fsync=False)


class TestManySaves:
    def test_all_can_be_found_afterwards(self, store: FileStore, tmp_path: Path) -> None:
        assert store.save_many(entry(n) for n in range(5)) == {}
        for n in range(5):
            assert torch.equal(store.load(f"{n:064x}", EXPECTED, CPU), tensor(n))
        assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 5

    def test_one_that_fails_is_named_and_the_others_are_saved(self, store: FileStore, tmp_path: Path) -> None:
        (tmp_path / "ns").mkdir()
        (tmp_path / "ns" / f"{1:064x}").write_text("in the way")
        bad = NewEntry("../x", tensor(), FINGERPRINT, "image", {})
        failures = store.save_many([entry(0), entry(1), bad, entry(2)])
        assert set(failures) == {f"{1:064x}", "../x"}
        assert isinstance(failures[f"{1:064x}"], StoreUnavailable)
        assert isinstance(failures["../x"], InvalidKey)
        assert store.probe(f"{0:064x}", EXPECTED).shape == store.probe(f"{2:064x}", EXPECTED).shape == (6, 8)

    def test_a_volume_that_fills_up_takes_what_fits_and_keeps_no_part(self, tmp_path: Path) -> None:
        with small_tmpfs(tmp_path / "full", 256 * 1024) as path:
            store = FileStore(path, "ns")
            failures = store.save_many([entry(0), entry(1, rows=8192), entry(2)])
            assert set(failures) == {f"{1:064x}"}
            assert "No space left" in str(failures[f"{1:064x}"])
            assert len([p for p in path.rglob("*") if p.is_file()]) == 2

    def test_flushes_come_after_all_writes_and_directories_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []

        def watch(module: object, name: str) -> None:
            real = getattr(module, name)

            def called(*arguments: object) -> object:
                calls.append(f"{name} {os.path.basename(str(arguments[0]))}" if "dir" in name else name)
                return real(*arguments)

            monkeypatch.setattr(module, name, called)

        for module, name in (
            (file_batch, "write_all"),
            (os, "fdatasync"),
            (os, "replace"),
            (file_batch, "sync_directory"),
        ):
            watch(module, name)
        store = FileStore(tmp_path, "ns", fsync=True)
        store.save_many([entry(0), entry(1)])
        directories = [f"sync_directory {n:064x}" for n in (0, 1)]
        last = ["sync_directory ns", f"sync_directory {tmp_path.name}"]
        assert calls[:6] == ["write_all"] * 2 + ["fdatasync"] * 2 + ["replace"] * 2
        assert calls[6:8] == directories
        assert sorted(calls[8:]) == sorted(last)

    def test_by_default_only_memory_is_not_flushed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flushed: list[int] = []
        monkeypatch.setattr(os, "fdatasync", flushed.append)
        with small_tmpfs(tmp_path / "memory", 1 << 20) as path:
            FileStore(path, "ns").save_many([entry(0)])
            assert flushed == []
            FileStore(path, "ns", fsync=True).save_many([entry(0)])
            assert len(flushed) == 1
        monkeypatch.setattr(file_store, "filesystem_type", lambda _: "nfs4")
        FileStore(tmp_path, "ns").save_many([entry(0)])
        assert len(flushed) == 2

    def test_a_directory_that_the_janitor_takes_away_is_made_again(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken: list[str] = []
        real = file_batch.make_directory

        def make_and_lose(path: str) -> bool:
            made = real(path)
            if made and path.endswith("0") and len(taken) < 2:
                taken.append(path)
                os.rmdir(path)
            return made

        monkeypatch.setattr(file_batch, "make_directory", make_and_lose)
        assert store.save_many([entry(0)]) == {}
        assert len(taken) == 2

    def test_saves_in_the_background_report_each_for_itself(self, store: FileStore, tmp_path: Path) -> None:
        (tmp_path / "ns").mkdir()
        (tmp_path / "ns" / f"{7:064x}").write_text("in the way")
        saver = GroupCommit(store, max_pending_bytes=500)  # two or three entries
        futures = [saver.submit(entry(n)) for n in range(20)]
        assert [future.exception(30) is None for future in futures] == [n != 7 for n in range(20)]
        saver.close()
        with pytest.raises(RuntimeError, match="closed"):
            saver.submit(entry(0))


class TestGivenBuffers:
    def test_a_tensor_of_the_entrys_kind_is_filled_and_returned(self, store: FileStore) -> None:
        store.save_many([entry(0)])
        into = torch.full((6, 8), 7.0)
        assert store.load(f"{0:064x}", EXPECTED, CPU, into) is into
        assert torch.equal(into, tensor(0))

    def test_bytes_enough_are_filled_from_the_start(self, store: FileStore) -> None:
        store.save_many([entry(0)])
        into = torch.zeros(1000, dtype=torch.uint8)
        loaded = store.load(f"{0:064x}", EXPECTED, CPU, into)
        assert torch.equal(loaded, tensor(0))
        assert loaded.data_ptr() == into.data_ptr()

    @pytest.mark.parametrize(
        "into",
        [
            torch.zeros(5, 8),
            torch.zeros(8, 6),
            torch.zeros(6, 8, dtype=torch.float64),
            torch.zeros(10, dtype=torch.uint8),
            torch.zeros(6, 16)[:, ::2],
        ],
    )
    def test_what_does_not_fit_is_refused(self, store: FileStore, into: torch.Tensor) -> None:
        store.save_many([entry(0)])
        with pytest.raises(ValueError, match=r"contiguous|does not go into"):
            store.load(f"{0:064x}", EXPECTED, CPU, into)


class TestVerification:
    def test_sample_checks_the_first_load_and_every_sixteenth_after_it(self, tmp_path: Path) -> None:
        FileStore(tmp_path, "ns").save_many([entry(0)])
        store = FileStore(tmp_path, "ns", verify="sample")
        flip_last_bit(store.path(f"{0:064x}"))
        checked = []
        for n in range(2 * SAMPLE_EVERY + 1):
            try:
                store.load(f"{0:064x}", EXPECTED, CPU)
            except EntryDamaged:
                checked.append(n)
        assert checked == [0, SAMPLE_EVERY, 2 * SAMPLE_EVERY]

    def test_never_checks_nothing_and_writes_no_checksum(self, tmp_path: Path) -> None:
        never, always = FileStore(tmp_path, "ns", verify="never"), FileStore(tmp_path, "ns")
        never.save_many([entry(0)])
        assert torch.equal(never.load(f"{0:064x}", EXPECTED, CPU), tensor(0))
        for read in (
            lambda: always.load(f"{0:064x}", EXPECTED, CPU),
            lambda: always.probe(f"{0:064x}", EXPECTED, deep=True),
        ):
            with pytest.raises(EntryDamaged, match=r"carries no checksum.*`verify` is `never`"):
                read()

    def test_a_large_payload_is_checked_to_its_last_byte(self, store: FileStore) -> None:
        rows = 3 * (1 << 20) // 32 + 5
        store.save_many([entry(0, rows)])
        expected = Expectation(FINGERPRINT, rows, 8, torch.float32)
        assert torch.equal(store.load(f"{0:064x}", expected, CPU), tensor(0, rows))
        flip_last_bit(store.path(f"{0:064x}"))
        for read in (
            lambda: store.load(f"{0:064x}", expected, CPU),
            lambda: store.probe(f"{0:064x}", expected, deep=True),
        ):
            with pytest.raises(EntryDamaged, match="checksum"):
                read()


class TestForeignEntries:
    """As vLLM's file connector writes them: bare layout, no metadata."""

    @pytest.fixture
    def key(self, tmp_path: Path) -> str:
        key = "ab" * 32
        (tmp_path / key).mkdir()
        save_file({"ec_cache": tensor(3)}, tmp_path / key / "encoder_cache.safetensors")
        return key

    def test_they_are_refused_and_the_option_is_named(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(EntryDamaged, match="the option accept_foreign"):
            FileStore(tmp_path, "").load(key, EXPECTED, CPU)

    def test_with_the_option_shape_and_dtype_are_checked(self, tmp_path: Path, key: str) -> None:
        store = FileStore(tmp_path, "", accept_foreign=True)
        with_metadata = Expectation(FINGERPRINT, 6, 8, torch.float32, {"image_grid_thw": [1, 4, 6]})
        assert torch.equal(store.load(key, with_metadata, CPU), tensor(3))
        store.probe(key, with_metadata, deep=True)
        for wrong in (Expectation(FINGERPRINT, 7, 8), Expectation(FINGERPRINT, 6, 8, torch.bfloat16)):
            with pytest.raises(EntryDamaged, match="expected"):
                store.load(key, wrong, CPU)

    def test_our_own_entries_are_checked_as_ever(self, tmp_path: Path) -> None:
        store = FileStore(tmp_path, "", accept_foreign=True)
        store.save_many([entry(0)])
        with pytest.raises(EntryDamaged, match="fingerprint"):
            store.load(f"{0:064x}", Expectation("e" * 64, 6, 8), CPU)


class TestAViewThatMayBeOld:
    """A network volume, by its type's name: what another node has just done shows a moment later."""

    @pytest.fixture
    def remote(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
        monkeypatch.setattr(file_store, "filesystem_type", lambda _: "nfs4")
        return FileStore(tmp_path, "ns")

    def test_the_directories_are_asked_for_anew_before_a_miss(
        self, remote: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        monkeypatch.setattr(file_store, "refresh_directory", asked.append)
        with pytest.raises(EntryMissing):
            remote.probe(f"{0:064x}", EXPECTED)
        directory = remote.path(f"{0:064x}").parent
        assert asked == [str(directory.parent), str(directory)]

    def test_whoever_knows_that_it_is_there_waits_a_moment(self, remote: FileStore) -> None:
        def late() -> None:
            time.sleep(0.05)
            remote.save_many([entry(0)])

        writer = threading.Thread(target=late)
        writer.start()
        assert torch.equal(remote.load(f"{0:064x}", EXPECTED, CPU, patient=True), tensor(0))
        writer.join()

    def test_a_stale_handle_is_opened_anew_on_any_volume(
        self, store: FileStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.save_many([entry(0)])
        real, failures = file_store.read_start, iter([OSError(116, "Stale file handle")])

        def stale_once(descriptor: int) -> tuple[bytes, int]:
            for error in failures:
                raise error
            return real(descriptor)

        monkeypatch.setattr(file_store, "read_start", stale_once)
        assert torch.equal(store.load(f"{0:064x}", EXPECTED, CPU), tensor(0))

    def test_a_damaged_entry_stays_damaged(self, remote: FileStore) -> None:
        remote.save_many([entry(0)])
        path = remote.path(f"{0:064x}")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(EntryDamaged, match="disagree"):
            remote.load(f"{0:064x}", EXPECTED, CPU, patient=True)


def as_user(uid: int, root: Path, key: str) -> None:
    """What a pod with another uid and the volume's group does with an entry."""
    os.umask(0o077)
    os.setgroups([])
    os.setgid(4242)
    os.setuid(uid)
    store = FileStore(root, "ns", fsync=False)
    assert torch.equal(store.load(key, EXPECTED, CPU), tensor(0))
    assert store.path(key).stat().st_mtime > 1, "it could not be marked as used"
    store.save(key, tensor(0), fingerprint=FINGERPRINT, modality="image", metadata={})
    assert store.path(key).stat().st_uid == uid
    store.save("cd" * 32, tensor(1), fingerprint=FINGERPRINT, modality="image", metadata={})


def test_pods_with_different_uids_and_one_group_read_touch_replace_and_clean_each_others_entries() -> None:
    root = Path("/var/tmp") / f"epd-uids-{os.getpid()}"  # pytest's own directories are closed to others
    root.mkdir()
    try:
        os.chown(root, 0, 4242)  # as fsGroup does
        root.chmod(0o2770)
        key = f"{0:064x}"
        store = FileStore(root, "ns", fsync=False)
        store.save_many([entry(0)])
        context = multiprocessing.get_context("spawn")
        for uid in (1001, 1002):
            os.utime(store.path(key), (1, 1))
            process = context.Process(target=as_user, args=(uid, root, key))
            process.start()
            process.join()
            assert process.exitcode == 0
    finally:
        shutil.rmtree(root)
