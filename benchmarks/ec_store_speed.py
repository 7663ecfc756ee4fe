"""Loads and saves of one tensor size, in rounds of every operation, so that all see the same weather."""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ec_store_worker import arena, put, save, write_plain
from ec_store_workers import Crew
from report import Row

from epd_engine.ec_store.entry import payload_view
from epd_engine.ec_store.file_store import FileStore
from tests.support.vllm import process_environment

READERS = (1, 4)
LOADS = ("memcpy", "arena", "arena checked", "segment", "read", "mmap", "file", "file checked")
SAVES = ("memcpy", "arena", "arena checked", "segment", "write", "file", "file checked")
BENCHMARKS = Path(__file__).parent
FEWEST = 2
GIGA = 1e9


class Size(NamedTuple):
    rounds: int
    pass_bytes: int
    """What one pass of one process moves, at least."""
    distinct_bytes: int
    """What the distinct tensors of one size take together, about."""


class Comparison(NamedTuple):
    name: str
    ours: str
    peers: tuple[str, ...]
    """The fastest of them counts."""
    target: float | None


LOAD_ROWS = (
    Comparison("memory", "arena", ("memcpy",), 0.8),
    Comparison("memory", "arena", ("segment",), 3.0),
    Comparison("memory, checksum", "arena checked", ("memcpy",), 0.55),
    Comparison("file", "file", ("read", "mmap"), 0.9),
    Comparison("file", "file", ("vllm load",), 1.0),
    Comparison("file, checksum", "file checked", ("read", "mmap"), None),
    Comparison("file, checksum", "file checked", ("vllm load",), 1.0),
)
SAVE_ROWS = (
    Comparison("memory", "arena", ("memcpy",), 0.7),
    Comparison("memory", "arena", ("segment",), 3.0),
    Comparison("memory, checksum", "arena checked", ("memcpy",), 0.55),
    Comparison("file", "file", ("write",), 0.9),
    Comparison("file", "file", ("vllm save",), 1.0),
    Comparison("file, checksum", "file checked", ("write",), None),
    Comparison("file, checksum", "file checked", ("vllm save",), 1.0),
)
PEER_NAMES = {
    "segment": "a segment an item",
    "read": "read(2)",
    "mmap": "mmap and copy",
    "write": "write(2)",
    "vllm load": "vLLM",
    "vllm save": "vLLM",
}


@dataclass(frozen=True)
class Crews:
    ours: Crew
    vllm: Crew | None

    @classmethod
    def start(cls, stack: ExitStack, vllm_python: Path | None, vllm_workers: int) -> "Crews":
        """As many workers as there are readers at most; vLLM's take seconds to start."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ours = Crew([sys.executable, BENCHMARKS / "ec_store_worker.py"], max(READERS), environment)
        vllm = None
        if vllm_python is not None:
            vllm = Crew([vllm_python, BENCHMARKS / "ec_store_vllm.py"], vllm_workers, process_environment())
        return cls(stack.enter_context(ours), stack.enter_context(vllm) if vllm else None)

    def of(self, operation: str) -> Crew | None:
        return self.vllm if operation.startswith("vllm") else self.ours

    def all(self) -> list[Crew]:
        return [self.ours, self.vllm] if self.vllm else [self.ours]


def speed(crews: Crews, rows: int, width: int, size: Size, memory: Path, files: Path) -> list[Row]:
    """All rows of bfloat16 tensors `[rows, width]`."""
    tensor_bytes = 2 * rows * width
    keys = [f"{index:064x}" for index in range(max(FEWEST, size.distinct_bytes // tensor_bytes))]
    repeat = max(1, size.pass_bytes // (len(keys) * tensor_bytes))
    where: dict[str, Any] = {
        "rows": rows,
        "width": width,
        "keys": keys,
        "memory": str(memory),
        "files": str(files),
    }
    found = []
    with ExitStack() as stack:
        lay_out(stack, rows, width, keys, memory, files)
        for crew in crews.all():
            crew.do("start_loads", **where)
        for readers in READERS:
            rates = rounds(crews, [*LOADS, "vllm load"], readers, len(keys), repeat, size.rounds)
            title = f"load [{rows}, {width}], {readers} reader{'s' * (readers > 1)}"
            found += compared(title, LOAD_ROWS, rates, tensor_bytes)
        for crew in crews.all():
            crew.do("end")
    for crew in crews.all():
        crew.do("start_saves", 1, **where)
    rates = rounds(crews, [*SAVES, "vllm save"], 1, len(keys), repeat, size.rounds, clean=True)
    found += compared(f"save [{rows}, {width}]", SAVE_ROWS, rates, tensor_bytes)
    for crew in crews.all():
        crew.do("end", 1)
    shutil.rmtree(memory / "saves")
    shutil.rmtree(files / "saves")
    return found


def lay_out(stack: ExitStack, rows: int, width: int, keys: list[str], memory: Path, files: Path) -> None:
    """The entries in every form that is loaded; gone with the stack."""
    tensors = [torch.randn(rows, width).bfloat16() for _ in keys]
    for name, checksums in (("arena", False), ("arena-checked", True)):
        writer = arena(memory / name, rows, width, len(keys), checksums=checksums)
        stack.callback(writer.close)
        for index, key in enumerate(keys):
            put(writer, index, key, tensors[index])
    store = FileStore(files, "files", fsync=False)
    for directory in (memory / "segments", files / "plain"):
        directory.mkdir()
        stack.callback(shutil.rmtree, directory)
        for key, tensor in zip(keys, tensors, strict=True):
            write_plain(f"{directory}/{key}", payload_view(tensor))
    stack.callback(shutil.rmtree, files / "files")
    for key, tensor in zip(keys, tensors, strict=True):
        save(store, key, tensor)
    os.sync()  # the disk is not busy with them later


def rounds(
    crews: Crews,
    operations: Sequence[str],
    workers: int,
    entries: int,
    repeat: int,
    count: int,
    *,
    clean: bool = False,
) -> dict[str, float]:
    """Entries a second in the best round, by operation; without those that have too few workers."""
    best: dict[str, float] = {}
    for index in range(count + 1):
        for operation in operations:
            crew = crews.of(operation)
            if crew is None or len(crew) < workers:
                continue
            rate = crew.rate(workers, operation, entries, repeat)
            if clean:
                crew.do("clean", workers)
            if index > 0:  # the first round warms everything up
                best[operation] = max(best.get(operation, 0.0), rate)
    return best


def compared(
    title: str, comparisons: Sequence[Comparison], rates: dict[str, float], tensor_bytes: int
) -> list[Row]:
    found = []
    speeds = {name: rate * tensor_bytes / GIGA for name, rate in rates.items()}
    for name, ours, peers, target in comparisons:
        if not set(peers) <= set(speeds):
            continue
        peer = max(peers, key=lambda each: speeds[each])
        label = PEER_NAMES.get(peer, peer)
        found.append(Row(f"{title}: {name}", speeds[ours], "GB/s", label, speeds[peer], target))
    return found
