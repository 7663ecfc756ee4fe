"""What it costs to ask whether the store has an entry: in a small store, in a large one, and in memory."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from ec_store_worker import FINGERPRINT, METADATA, arena, put
from ec_store_workers import median_seconds
from report import Row

from epd_engine.ec_store.arena.store import MemoryStore
from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_store.errors import EntryMissing
from epd_engine.ec_store.file_store import FileStore, NewEntry

ROWS, WIDTH = 16, 64
EXPECTED = Expectation(FINGERPRINT, ROWS, WIDTH, torch.bfloat16)
FEW, ASKED = 1000, 1000  # more than parsed headers that a store remembers
BATCH = 100
ROUNDS = 9
LIMIT_US = 50.0


def look_ups(files: Path, memory: Path, entries: int) -> list[Row]:
    few = filled(files / "few", FEW)
    many = filled(files / "many", entries)
    writer = arena(memory / "looked-up", ROWS, WIDTH, FEW, checksums=False)
    for index in range(FEW):
        put(writer, index, key_of(index), torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
    held = MemoryStore(memory / "looked-up")
    chosen = [key_of(index) for index in random.Random(4).sample(range(entries), ASKED)]
    names = [key_of(index) for index in range(FEW)]
    missing = [key_of(entries + index) for index in range(ASKED)]
    of_few, of_many, of_memory, misses = microseconds(
        [
            lambda index: few.probe(names[index], EXPECTED),
            lambda index: many.probe(chosen[index], EXPECTED),
            lambda index: held.probe(names[index], EXPECTED),
            lambda index: has(many, missing[index]),
        ]
    )
    writer.close()
    title = f"has item, files, {entries}"
    return [
        Row(f"has item, files, {FEW} entries", of_few, "us", "limit", LIMIT_US, 1.0),
        Row(f"{title} entries", of_many, "us", "limit", LIMIT_US, 1.0),
        Row(f"{title} entries", of_many, "us", f"{FEW} entries", of_few, 0.9),
        Row(f"{title} entries, a miss", misses, "us", "limit", LIMIT_US, 1.0),
        Row(f"has item, memory, {FEW} entries", of_memory, "us", "limit", LIMIT_US, 1.0),
    ]


def key_of(index: int) -> str:
    return f"{index * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4


def filled(root: Path, entries: int) -> FileStore:
    """A store with so many entries, no two of which have the same header: parsed ones are remembered."""
    root.mkdir()
    store, tensor = FileStore(root, "", fsync=False), torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    for begin in range(0, entries, BATCH):
        batch = [
            NewEntry(key_of(index), tensor, FINGERPRINT, "image", {**METADATA, "index": index})
            for index in range(begin, min(begin + BATCH, entries))
        ]
        failures = store.save_many(batch)
        assert not failures, failures
    return store


def has(store: FileStore, key: str) -> bool:
    try:
        store.probe(key, EXPECTED)
    except EntryMissing:
        return False
    return True


def microseconds(functions: list[Callable[[int], object]]) -> list[float]:
    """Of one call: the median of `ASKED` ones in the best round."""
    found = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for index, function in enumerate(functions):
            found[index] = min(found[index], 1e6 * median_seconds(function, ASKED, 1))
    return found
