import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epd_engine.ec_store.entry import Expectation, payload_view
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, InvalidKey, StoreUnavailable
from epd_engine.ec_store.file_store import FileStore
from tests.support.mounts import small_tmpfs

KEY = "ab" * 32
FINGERPRINT = "f" * 64
CPU = torch.device("cpu")


def tensor(seed: int = 0, rows: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expect(rows: int = 6, dtype: torch.dtype = torch.float32) -> Expectation:
    return Expectation(FINGERPRINT, rows, 8, dtype)


def save(store: FileStore, value: torch.Tensor, key: str = KEY) -> Path:
    metadata = {"image_grid_thw": [1, 4, 6]}
    store.save(key, value, fingerprint=FINGERPRINT, modality="image", metadata=metadata)
    return store.path(key)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, "0123456789abcdef", fsync=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_saved_is_loaded_bit_for_bit(store: FileStore, dtype: torch.dtype) -> None:
    save(store, tensor(dtype=dtype))
    loaded = store.load(KEY, expect(dtype=dtype), CPU)
    assert loaded.dtype == dtype
    assert torch.equal(loaded, tensor(dtype=dtype))


def test_a_tensor_that_is_not_contiguous_is_saved_right(store: FileStore) -> None:
    save(store, tensor(rows=8).t().contiguous().t()[:6])
    assert torch.equal(store.load(KEY, expect(), CPU), tensor(rows=8)[:6])


def test_any_safetensors_reader_reads_an_entry(store: FileStore) -> None:
    path = save(store, tensor())
    assert torch.equal(load_file(path)["ec_cache"], tensor())
    with safe_open(path, "pt") as file:
        said = file.metadata()
    assert said["model_fingerprint"] == FINGERPRINT
    assert said["checksum_algorithm"] == "xxh3-128"
    assert said["placeholder"] == '{"image_grid_thw": [1, 4, 6]}'


def test_the_layout_is_namespace_then_key(tmp_path: Path) -> None:
    path = save(FileStore(tmp_path, "ns"), tensor())
    assert path == tmp_path / "ns" / KEY / "encoder_cache.safetensors"
    assert save(FileStore(tmp_path, ""), tensor()) == tmp_path / KEY / "encoder_cache.safetensors"


def test_modes_let_one_group_share_whatever_the_umask(store: FileStore) -> None:
    before = os.umask(0o077)
    try:
        path = save(store, tensor())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o2770
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o2770


def test_a_look_up_leaves_nothing_behind(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(EntryMissing):
        store.probe(KEY, expect())
    with pytest.raises(EntryMissing):
        store.load(KEY, expect(), CPU)
    assert list(tmp_path.iterdir()) == []


def test_a_key_with_a_path_in_it_never_reaches_the_file_system(store: FileStore, tmp_path: Path) -> None:
    for bad in ("../" + "a" * 61, "/etc/passwd", KEY[:-1] + "/"):
        with pytest.raises(InvalidKey):
            save(store, tensor(), key=bad)
    assert list(tmp_path.iterdir()) == []


def test_a_namespace_is_one_path_component(tmp_path: Path) -> None:
    for bad in ("..", ".", "a/b", "/abs"):
        with pytest.raises(ValueError, match="one path component"):
            FileStore(tmp_path, bad)


def test_nothing_temporary_remains_after_a_save(store: FileStore) -> None:
    path = save(store, tensor())
    assert [p.name for p in path.parent.iterdir()] == ["encoder_cache.safetensors"]


def test_a_second_save_replaces_the_first(store: FileStore) -> None:
    save(store, tensor(1))
    save(store, tensor(2))
    assert torch.equal(store.load(KEY, expect(), CPU), tensor(2))


def test_a_load_marks_the_entry_as_used(store: FileStore) -> None:
    path = save(store, tensor())
    os.utime(path, (1, 1))
    store.load(KEY, expect(), CPU)
    assert path.stat().st_mtime > 1


class TestDamage:
    """Every way in which an entry can be wrong is found before a byte of it is used."""

    def refused(self, store: FileStore, match: str, expected: Expectation | None = None) -> None:
        for read in (
            lambda: store.load(KEY, expected or expect(), CPU),
            lambda: store.probe(KEY, expected or expect(), deep=True),
        ):
            with pytest.raises(EntryDamaged, match=match):
                read()

    @pytest.mark.parametrize("keep", [0, 4, 8, 20, 300, -1])
    def test_a_truncated_file(self, store: FileStore, keep: int) -> None:
        path = save(store, tensor())
        path.write_bytes(path.read_bytes()[:keep])
        self.refused(store, "empty|shorter|header|disagree")

    def test_a_longer_file(self, store: FileStore) -> None:
        path = save(store, tensor())
        path.write_bytes(path.read_bytes() + b"x")
        self.refused(store, "disagree")

    def test_every_flipped_payload_bit(self, store: FileStore) -> None:
        path = save(store, tensor())
        data = bytearray(path.read_bytes())
        for at in (len(data) - 1, len(data) - payload_view(tensor()).nbytes):
            data[at] ^= 1
            path.write_bytes(data)
            self.refused(store, "checksum")
            data[at] ^= 1

    def test_a_header_that_is_not_ours(self, store: FileStore) -> None:
        path = save(store, tensor())
        save_file({"ec_cache": tensor()}, path)
        self.refused(store, "none of our metadata.*accept_foreign")

    def test_a_header_length_beyond_reason(self, store: FileStore) -> None:
        path = save(store, tensor())
        path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
        self.refused(store, "header of")

    def test_another_number_of_rows_width_dtype_or_model(self, store: FileStore) -> None:
        save(store, tensor())
        self.refused(store, "number of embeddings", Expectation(FINGERPRINT, 7, 8, torch.float32))
        self.refused(store, "width", Expectation(FINGERPRINT, 6, 16, torch.float32))
        self.refused(store, "dtype", Expectation(FINGERPRINT, 6, 8, torch.bfloat16))
        self.refused(store, "fingerprint", Expectation("e" * 64, 6, 8, torch.float32))
        grid = {"image_grid_thw": [1, 6, 4]}
        self.refused(store, "placeholder metadata", Expectation(FINGERPRINT, 6, 8, None, grid))

    def test_a_directory_in_the_files_place(self, store: FileStore) -> None:
        path = store.path(KEY)
        path.mkdir(parents=True)
        with pytest.raises(StoreUnavailable):
            store.load(KEY, expect(), CPU)


def test_a_shallow_probe_reads_the_header_alone(store: FileStore) -> None:
    path = save(store, tensor())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.probe(KEY, expect()).shape == (6, 8)


@pytest.fixture
def full_volume(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "full", 64 * 1024) as path:
        yield path


def test_a_full_volume_is_a_clear_error_and_leaves_no_part(full_volume: Path) -> None:
    store = FileStore(full_volume, "ns")
    with pytest.raises(StoreUnavailable, match="No space left"):
        save(store, tensor(rows=8192))
    assert not any(p.is_file() for p in full_volume.rglob("*"))
    save(store, tensor())  # and what fits is still taken
    assert torch.equal(store.load(KEY, expect(), CPU), tensor())


def test_a_read_only_volume_is_read_and_not_written(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "ro", 1 << 20) as path:
        save(FileStore(path, "ns"), tensor())
        os.system(f"mount -o remount,ro {path}")
        store = FileStore(path, "ns")
        assert torch.equal(store.load(KEY, expect(), CPU), tensor())
        with pytest.raises(StoreUnavailable, match="Read-only"):
            save(store, tensor(), key="cd" * 32)


def write_many(root: Path, seed: int, count: int) -> None:
    store = FileStore(root, "ns", fsync=False)
    for _ in range(count):
        save(store, tensor(seed, rows=512))


def test_two_writers_of_one_key_never_make_a_torn_read(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, seed, 300)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    store, seen = FileStore(tmp_path, "ns"), set()
    valid = {seed: tensor(seed, rows=512) for seed in (1, 2)}
    while any(w.is_alive() for w in writers):
        try:
            loaded = store.load(KEY, expect(rows=512), CPU)
        except EntryMissing:
            continue  # before the first save
        match = [seed for seed, value in valid.items() if torch.equal(loaded, value)]
        assert match, "a read returned neither writer's tensor"
        seen.add(match[0])
    assert [w.exitcode for w in writers] == [0, 0]
    assert seen, "the reader never saw an entry"
    assert [p.name for p in store.path(KEY).parent.iterdir()] == ["encoder_cache.safetensors"]
