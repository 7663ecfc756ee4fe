"""A worker of `ec_store.py`: loads and saves by our store, and by what it is measured against.

Every operation goes over the same number of distinct tensors of the same size. Loads end in one warm target;
saves begin at private warm sources.
"""

import mmap
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import psutil
import torch
from ec_store_workers import median_seconds, serve

from epd_engine.ec_store.arena.store import MemoryStore
from epd_engine.ec_store.arena.writer import ArenaWriter
from epd_engine.ec_store.entry import Expectation, payload_view
from epd_engine.ec_store.file_store import FileStore
from epd_engine.ec_store.ranges import rounded

CPU = torch.device("cpu")
FINGERPRINT = "f" * 64
METADATA = {"image_grid_thw": [1, 32, 32]}
ENTRY_ROOM = 4096  # bytes an entry takes beside its payload, at most
ARENA_BYTES_A_SLOT = 32 * 1024  # an arena has a slot for each of them


def entry_bytes(rows: int, width: int) -> int:
    """What an entry takes in an arena."""
    return rounded(2 * rows * width + ENTRY_ROOM)


def arena(directory: Path, rows: int, width: int, entries: int, *, checksums: bool) -> ArenaWriter:
    """An arena with room for so many entries."""
    capacity = entries * max(entry_bytes(rows, width), ARENA_BYTES_A_SLOT)
    return ArenaWriter(directory, capacity, fingerprint=FINGERPRINT, checksums=checksums)


def put(writer: ArenaWriter, index: int, key: str, tensor: torch.Tensor) -> None:
    offset = index * entry_bytes(*tensor.shape)
    writer.put(key, offset, tensor, modality="image", metadata=METADATA)


def save(store: FileStore, key: str, tensor: torch.Tensor) -> None:
    store.save(key, tensor, fingerprint=FINGERPRINT, modality="image", metadata=METADATA)


def write_segment(path: str, source: torch.Tensor) -> None:
    """A shared-memory segment of its own for one item, as the follow-up to vLLM's file connector has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.ftruncate(descriptor, source.nbytes)
    with mmap.mmap(descriptor, source.nbytes) as mapped:
        os.close(descriptor)
        into = torch.frombuffer(mapped, dtype=source.dtype).view(source.shape)
        into.copy_(source)
        del into


def read_mapped(path: str, target: torch.Tensor) -> None:
    """Maps a file that holds nothing but the tensor, and copies it."""
    descriptor = os.open(path, os.O_RDONLY)
    with mmap.mmap(descriptor, target.nbytes, mmap.MAP_PRIVATE) as mapped:  # writable, for torch's sake
        os.close(descriptor)
        source = torch.frombuffer(mapped, dtype=target.dtype).view(target.shape)
        target.copy_(source)
        del source


def read_plain(path: str, target: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(target):
        done += os.readv(descriptor, [target[done:]])
    os.close(descriptor)


def write_plain(path: str, source: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o660)
    done = 0
    while done < len(source):
        done += os.write(descriptor, source[done:])
    os.close(descriptor)


class Worker:
    """One tensor size at a time."""

    def __init__(self) -> None:
        self._consumed: dict[str, FileStore | MemoryStore] = {}
        self.end()

    def end(self) -> None:
        """Gives the memory of this size back."""
        self._keys: list[str] = []
        self._operations: dict[str, Callable[[int], object]] = {}

    def start_loads(self, rows: int, width: int, keys: list[str], memory: str, files: str) -> None:
        """The directories hold every form of the entries `keys`, as `ec_store.py` lays them out."""
        self._keys = keys
        self._operations = load_operations(rows, width, keys, Path(memory), Path(files))

    def start_saves(self, rows: int, width: int, keys: list[str], memory: str, files: str) -> None:
        """In place of `start_loads`: what is saved goes to directories of its own."""
        self._keys, self._memory, self._files = keys, Path(memory, "saves"), Path(files, "saves")
        self._saved = count()
        self.clean()
        self._operations = save_operations(rows, width, keys, self._memory, self._files, self._new_key)

    def run(self, operation: str, repeat: int) -> float:
        return median_seconds(self._operations[operation], len(self._keys), repeat)

    def clean(self) -> None:
        """Removes what was saved as files; the arenas stay, and are written over."""
        for directory in (self._memory / "segments", self._files / "plain", self._files / "files"):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        shutil.rmtree(self._files / "files-checked", ignore_errors=True)

    def consume(self, form: str, directory: str, keys: list[str], rows: int, width: int) -> int:
        """Loads each entry into a tensor of its own and drops it; then the resident bytes of this process."""
        if form not in self._consumed:
            path = Path(directory)
            self._consumed[form] = (
                MemoryStore(path, verify=True) if form == "arena" else FileStore(path, "files")
            )
        expected = Expectation(FINGERPRINT, rows, width, torch.bfloat16, METADATA)
        for key in keys:
            self._consumed[form].load(key, expected, CPU)
        return int(psutil.Process().memory_info().rss)

    def _new_key(self) -> str:
        return f"{next(self._saved):064x}"


def load_operations(
    rows: int, width: int, keys: list[str], memory: Path, files: Path
) -> dict[str, Callable[[int], object]]:
    """Each brings entry `i` into one target."""
    target = torch.zeros(rows, width, dtype=torch.bfloat16)
    raw, expected = payload_view(target), Expectation(FINGERPRINT, rows, width, torch.bfloat16, METADATA)
    sources = [torch.randn(rows, width).bfloat16() for _ in keys]
    plain, checked = MemoryStore(memory / "arena"), MemoryStore(memory / "arena-checked", verify=True)
    unchecked_files, checked_files = FileStore(files, "files", verify="never"), FileStore(files, "files")
    return {
        "memcpy": lambda i: target.copy_(sources[i]),
        "arena": lambda i: plain.load(keys[i], expected, CPU, target),
        "arena checked": lambda i: checked.load(keys[i], expected, CPU, target),
        "segment": lambda i: read_mapped(f"{memory}/segments/{keys[i]}", target),
        "read": lambda i: read_plain(f"{files}/plain/{keys[i]}", raw),
        "mmap": lambda i: read_mapped(f"{files}/plain/{keys[i]}", target),
        "file": lambda i: unchecked_files.load(keys[i], expected, CPU, target),
        "file checked": lambda i: checked_files.load(keys[i], expected, CPU, target),
    }


def save_operations(
    rows: int, width: int, keys: list[str], memory: Path, files: Path, new_key: Callable[[], str]
) -> dict[str, Callable[[int], object]]:
    """Each saves tensor `i`: into memory over what was there, as a file under a new name."""
    sources = [torch.randn(rows, width).bfloat16() for _ in keys]
    targets = [torch.zeros_like(source) for source in sources]
    raw = [payload_view(source) for source in sources]
    plain, checked = (
        arena(memory / name, rows, width, len(keys), checksums=checksums)
        for name, checksums in (("arena", False), ("arena-checked", True))
    )
    unchecked_files = FileStore(files, "files", fsync=False, verify="never")
    checked_files = FileStore(files, "files-checked", fsync=False)
    return {
        "memcpy": lambda i: targets[i].copy_(sources[i]),
        "arena": lambda i: put(plain, i, keys[i], sources[i]),
        "arena checked": lambda i: put(checked, i, keys[i], sources[i]),
        "segment": lambda i: write_segment(f"{memory}/segments/{new_key()}", sources[i]),
        "write": lambda i: write_plain(f"{files}/plain/{new_key()}", raw[i]),
        "file": lambda i: save(unchecked_files, new_key(), sources[i]),
        "file checked": lambda i: save(checked_files, new_key(), sources[i]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker = Worker()
    names = ("start_loads", "start_saves", "run", "clean", "end", "consume")
    serve({name: getattr(worker, name) for name in names})
