"""Arenas: what readers see of a producer that writes, replaces, dies or lies."""

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd_engine.ec_store.arena import MemoryUsage, memory_usage, sweep
from epd_engine.ec_store.arena.layout import EPOCH_WORD, HEADER, PAGE, SLOT_BYTES, Geometry
from epd_engine.ec_store.arena.reader import ArenaReader
from epd_engine.ec_store.arena.store import MemoryStore
from epd_engine.ec_store.arena.writer import ArenaWriter
from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, InvalidKey, StoreError, StoreUnavailable
from tests.support.mounts import small_tmpfs

CPU = torch.device("cpu")
FINGERPRINT = "f" * 64
KEYS = [f"{n:064x}" for n in range(1, 9)]
META = {"image_grid_thw": [1, 4, 4]}
ROWS, WIDTH = 4, 8
EXPECTED = Expectation(FINGERPRINT, ROWS, WIDTH, torch.bfloat16, META)
STEP = 1024
CAPACITY = 4 << 20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "memory", 16 << 20) as path:
        yield path


def writer(memory: Path, capacity: int = CAPACITY, *, checksums: bool = True) -> ArenaWriter:
    return ArenaWriter(memory, capacity, fingerprint=FINGERPRINT, checksums=checksums)


def tensor(seed: int) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), float(seed), dtype=torch.bfloat16)


def put(arena: ArenaWriter, key: str, offset: int, value: torch.Tensor) -> None:
    arena.put(key, offset, value, modality="image", metadata=META)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_put_is_found_and_loaded(memory: Path, dtype: torch.dtype, checksums: bool) -> None:
    arena, store = writer(memory, checksums=checksums), MemoryStore(memory, verify=True)
    value = torch.randn(ROWS, WIDTH).to(dtype)
    put(arena, KEYS[0], 0, value)
    expected = Expectation(FINGERPRINT, ROWS, WIDTH, dtype, META)
    header = store.probe(KEYS[0], expected, deep=True)
    assert (header.modality, header.metadata, header.shape) == ("image", META, (ROWS, WIDTH))
    assert torch.equal(store.load(KEYS[0], expected, CPU), value)
    into = torch.empty(ROWS, WIDTH, dtype=dtype)
    assert store.load(KEYS[0], expected, CPU, into) is into
    assert torch.equal(into, value)


def test_a_missing_key_is_missing_and_leaves_no_trace(memory: Path) -> None:
    store = MemoryStore(memory / "nowhere")
    with pytest.raises(EntryMissing):
        store.probe(KEYS[0], EXPECTED)
    with pytest.raises(InvalidKey):
        store.probe("../x", EXPECTED)
    assert list(memory.iterdir()) == []


def test_entries_of_all_producers_are_found_as_they_come_and_go(memory: Path) -> None:
    store = MemoryStore(memory)
    arenas = [writer(memory) for _ in range(3)]
    for n, arena in enumerate(arenas):
        put(arena, KEYS[n], 0, tensor(n))
        assert torch.equal(store.load(KEYS[n], EXPECTED, CPU), tensor(n))
    arenas[1].close()
    with pytest.raises(EntryMissing):
        store.load(KEYS[1], EXPECTED, CPU)
    assert torch.equal(store.load(KEYS[2], EXPECTED, CPU), tensor(2))
    assert store.num_arenas == 2


def test_a_retired_entry_is_gone_for_those_who_knew_it(memory: Path) -> None:
    arena, store = writer(memory), MemoryStore(memory)
    put(arena, KEYS[0], 0, tensor(1))
    store.probe(KEYS[0], EXPECTED)
    arena.retire(KEYS[0])
    with pytest.raises(EntryMissing):
        store.load(KEYS[0], EXPECTED, CPU)


def test_reused_bytes_are_never_taken_for_the_entry_that_was_there(memory: Path) -> None:
    arena, reader = writer(memory), None
    put(arena, KEYS[0], 0, tensor(1))
    reader = ArenaReader(arena.path)
    located = reader.find(KEYS[0])
    assert located is not None
    assert reader.is_current(located)
    arena.retire(KEYS[0])
    put(arena, KEYS[1], 0, tensor(2))
    assert not reader.is_current(located), "the same slot and the same bytes, another entry"
    assert reader.find(KEYS[0]) is None


def test_a_replaced_entry_is_read_anew(memory: Path) -> None:
    arena, store = writer(memory), MemoryStore(memory)
    put(arena, KEYS[0], 0, tensor(1))
    assert torch.equal(store.load(KEYS[0], EXPECTED, CPU), tensor(1))
    put(arena, KEYS[0], STEP, tensor(2))
    assert torch.equal(store.load(KEYS[0], EXPECTED, CPU), tensor(2))
    assert len(arena) == 1


def test_keys_of_one_bucket_are_kept_apart(memory: Path) -> None:
    arena, store = writer(memory), MemoryStore(memory)
    keys = ["00000000" + f"{n:056x}" for n in range(6)]
    for n, key in enumerate(keys):
        put(arena, key, n * STEP, tensor(n))
    for gone in (3, 0, 5):  # from the middle, the end and the head of the chain
        arena.retire(keys[gone])
    for n, key in enumerate(keys):
        if n in (3, 0, 5):
            with pytest.raises(EntryMissing):
                store.probe(key, EXPECTED)
        else:
            assert torch.equal(store.load(key, EXPECTED, CPU), tensor(n))


def test_a_producer_that_died_changing_the_index_costs_misses_only(memory: Path) -> None:
    arena, store = writer(memory), MemoryStore(memory)
    put(arena, KEYS[0], 0, tensor(1))
    arena._words[EPOCH_WORD] += 1
    with pytest.raises(EntryMissing):
        store.load(KEYS[0], EXPECTED, CPU)


def test_another_models_entry_or_another_shape_is_refused(memory: Path) -> None:
    arena, store = writer(memory), MemoryStore(memory)
    put(arena, KEYS[0], 0, tensor(1))
    for wrong in (
        Expectation("e" * 64, ROWS, WIDTH, torch.bfloat16, META),
        Expectation(FINGERPRINT, ROWS + 1, WIDTH, torch.bfloat16, META),
        Expectation(FINGERPRINT, ROWS, WIDTH, torch.float32, META),
        Expectation(FINGERPRINT, ROWS, WIDTH, torch.bfloat16, {"image_grid_thw": [1, 2, 8]}),
    ):
        with pytest.raises(EntryDamaged):
            store.load(KEYS[0], wrong, CPU)


def test_a_flipped_bit_is_found_where_loads_are_verified(memory: Path) -> None:
    arena = writer(memory)
    put(arena, KEYS[0], 0, tensor(1))
    with open(arena.path, "r+b") as file:
        file.seek(arena.geometry.data_at + 3)
        file.write(b"\xff")
    with pytest.raises(EntryDamaged, match="checksum"):
        MemoryStore(memory, verify=True).load(KEYS[0], EXPECTED, CPU)
    with pytest.raises(EntryDamaged, match="checksum"):
        MemoryStore(memory).probe(KEYS[0], EXPECTED, deep=True)


def test_no_flipped_bit_of_an_index_gives_a_wrong_tensor(memory: Path) -> None:
    """Each bit of the header, of the buckets that are used, and of the slots: right, or an error by name."""
    arena = writer(memory)
    stored = {key: tensor(seed) for seed, key in enumerate(KEYS[:2], 1)}
    for place, (key, value) in enumerate(stored.items()):
        put(arena, key, place * STEP, value)
    geometry = arena.geometry
    parts = [(0, HEADER.size)]
    parts += [(geometry.buckets_at + 4 * geometry.bucket(bytes.fromhex(key)), 4) for key in stored]
    parts += [(geometry.slots_at + arena._slots[key] * SLOT_BYTES, SLOT_BYTES) for key in stored]
    outcomes = set()
    with open(arena.path, "r+b", buffering=0) as file:
        for byte in (begin + n for begin, length in parts for n in range(length)):
            whole = os.pread(file.fileno(), 1, byte)
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([whole[0] ^ 1 << bit]), byte)
                store = MemoryStore(memory, verify=True)
                for key, value in stored.items():
                    try:
                        assert torch.equal(store.load(key, EXPECTED, CPU), value), (byte, bit)
                        outcomes.add("right")
                    except StoreError as error:
                        outcomes.add(type(error).__name__)
            os.pwrite(file.fileno(), whole, byte)
    assert outcomes == {"right", "EntryMissing", "EntryDamaged"}


@pytest.mark.parametrize(
    ("place", "data"),
    [
        pytest.param(16, struct.pack("<Q", 1 << 60), id="offset"),
        pytest.param(24, struct.pack("<Q", 1 << 60), id="payload size"),
        pytest.param(32, struct.pack("<I", 1 << 30), id="text size"),
        pytest.param(36, struct.pack("<I", 1 << 30), id="rows"),
        pytest.param(44, b"\x63", id="dtype"),
    ],
)
def test_a_slot_that_lies_is_refused_before_anything_is_read(memory: Path, place: int, data: bytes) -> None:
    arena = writer(memory)
    put(arena, KEYS[0], 0, tensor(1))
    slot = arena._slots[KEYS[0]]
    with open(arena.path, "r+b") as file:
        # generation 0, next 8, offset 16, payload 24, text 32, rows 36, width 40, dtype 44
        file.seek(arena.geometry.slots_at + slot * SLOT_BYTES + place)
        file.write(data)
    with pytest.raises(EntryDamaged):
        MemoryStore(memory).load(KEYS[0], EXPECTED, CPU)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda b: b"NOTARENA" + b[8:], id="foreign"),
        pytest.param(lambda b: b[:8] + struct.pack("<I", 99) + b[12:], id="version"),
        pytest.param(lambda b: b[:12] + struct.pack("<I", 1 << 31) + b[16:], id="slots"),
        pytest.param(lambda b: b[:32] + struct.pack("<Q", 1 << 50) + b[40:], id="oversized"),
        pytest.param(lambda b: b[:PAGE], id="truncated"),
        pytest.param(lambda b: b"", id="empty"),
    ],
)
def test_what_is_no_arena_of_ours_is_left_out(memory: Path, spoil) -> None:  # type: ignore[no-untyped-def]
    arena = writer(memory, 1 << 20)
    put(arena, KEYS[0], 0, tensor(1))
    bad = memory / "bad.arena"
    bad.write_bytes(spoil(arena.path.read_bytes()))
    with pytest.raises(EntryDamaged):
        ArenaReader(bad)
    assert torch.equal(MemoryStore(memory).load(KEYS[0], EXPECTED, CPU), tensor(1))


def test_a_capacity_beyond_the_mount_is_refused_at_start(memory: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"lower `capacity` or enlarge the mount"):
        writer(memory, 64 << 20)
    assert list(memory.iterdir()) == []


def test_a_directory_on_a_disk_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="needs a tmpfs"):
        writer(tmp_path)


def test_a_full_tmpfs_is_an_error_and_no_crash(memory: Path) -> None:
    arena = writer(memory, 12 << 20)
    (memory / "ballast").write_bytes(bytes(15 << 20))
    with pytest.raises(StoreUnavailable, match="no room"):
        put(arena, KEYS[0], 0, torch.zeros(1 << 20, 2, dtype=torch.bfloat16))
    (memory / "ballast").unlink()
    put(arena, KEYS[0], 0, tensor(1))
    assert torch.equal(MemoryStore(memory).load(KEYS[0], EXPECTED, CPU), tensor(1))


def test_memory_is_taken_when_needed_and_given_back(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "m", 200 << 20) as memory:
        arena = writer(memory, 150 << 20)
        assert arena.committed == 0
        put(arena, KEYS[0], 0, tensor(1))
        put(arena, KEYS[1], 100 << 20, tensor(2))
        taken = os.statvfs(memory).f_bfree * PAGE
        arena.retire(KEYS[1])
        arena.shrink(STEP)
        assert os.statvfs(memory).f_bfree * PAGE - taken > 90 << 20
        assert torch.equal(MemoryStore(memory).load(KEYS[0], EXPECTED, CPU), tensor(1))
        put(arena, KEYS[1], 100 << 20, tensor(3))
        assert torch.equal(MemoryStore(memory).load(KEYS[1], EXPECTED, CPU), tensor(3))


def test_slots_run_out_with_a_clear_error(memory: Path) -> None:
    arena = writer(memory, 1 << 20)
    slots = Geometry.of(1 << 20).slots
    for n in range(slots):
        put(arena, f"{n:064x}", n * STEP, tensor(1))
    with pytest.raises(StoreUnavailable, match="slots"):
        put(arena, "f" * 64, slots * STEP, tensor(1))


def test_only_arenas_of_the_dead_are_swept(memory: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from epd_engine.ec_store.arena.writer import ArenaWriter\n"
        f"a = ArenaWriter(Path(sys.argv[1]), {CAPACITY}, fingerprint='f', checksums=False);"
        "print(a.path, flush=True); time.sleep(60)"
    )
    base = memory / "namespace"
    with subprocess.Popen([sys.executable, "-c", code, str(base)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().decode().strip())
        mine = writer(base)
        assert sweep(memory) == []
        process.kill()
        process.wait()
    (base / "torn.unfinished").write_bytes(b"x")
    assert sweep(memory) == [str(path), str(base / "torn.unfinished")] or not path.exists()
    assert mine.path.exists()
    assert sweep(memory) == []


def test_usage_counts_what_is_there(memory: Path) -> None:
    assert memory_usage(memory / "nowhere") == MemoryUsage()
    arenas = [writer(memory / "namespace") for _ in range(2)]
    for n, key in enumerate(KEYS[:3]):
        put(arenas[0], key, n * STEP, tensor(n))
    put(arenas[1], KEYS[3], 0, tensor(3))
    arenas[0].retire(KEYS[0])
    (memory / "foreign.arena").write_bytes(b"x" * 8192)
    usage = memory_usage(memory)
    assert (usage.entries, usage.arenas, usage.capacity) == (3, 2, CAPACITY)
    assert 3 * ROWS * WIDTH * 2 < usage.bytes < 3 * STEP
    assert usage.committed == sum(arena.committed for arena in arenas)


def test_a_reader_among_constant_replacement_gets_whole_entries_or_misses(memory: Path) -> None:
    """Two keys share one place in turn; whatever is returned under a key is that key's tensor."""
    arena, store = writer(memory), MemoryStore(memory)
    size = (256, 1024)
    values = {key: torch.full(size, float(n), dtype=torch.bfloat16) for n, key in enumerate(KEYS[:2])}
    expected = Expectation(FINGERPRINT, *size, torch.bfloat16, META)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for key, value in values.items():
                put(arena, key, 0, value)
                time.sleep(0.0002)  # with less a reader never gets a word in
                arena.retire(key)

    thread = threading.Thread(target=churn)
    thread.start()
    hits = 0
    try:
        for n in range(20_000):
            key = KEYS[n % 2]
            try:
                loaded = store.load(key, expected, CPU)
            except EntryMissing:
                continue
            assert torch.equal(loaded, values[key])
            hits += 1
            if hits >= 50:
                break
    finally:
        stop.set()
        thread.join()
    assert hits, "the reader never met an entry"
