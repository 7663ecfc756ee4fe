"""Loads of KV in the background: files of a transfer into the pool's blocks."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from epd_engine.attention.kv_cache import KVCache
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.layout import refresh_directory
from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.block_file import BlockRange, read_blocks
from epd_engine.kv_transfer.block_saver import pulled, remove_quietly

THREADS = 2
# Seconds before each look that follows a failed one: another node's view of a volume may be a moment old.
RECHECK = (0.0, 0.02, 0.1, 0.3)


@dataclass(frozen=True)
class BlockLoad:
    """Blocks `[first, ends[-1])` of a prompt into `block_ids`. `ends` are the ends of the files' ranges."""

    request_id: str
    transfer_id: str
    digest: str
    ends: Sequence[int]
    first: int
    block_ids: Sequence[int]


class BlockLoader:
    """Threads that read into blocks which nobody else uses meanwhile."""

    def __init__(self, identity: KVModelIdentity, base: Path, cache: KVCache, *, patient: bool):
        """`patient`: the volume's view may be old."""
        self._identity, self._base, self._cache, self._patient = identity, base, cache, patient
        self._pool = ThreadPoolExecutor(THREADS, "kv-load")

    def load(self, load: BlockLoad, on_progress: Callable[[], None]) -> "Future[int]":
        """The future has the bytes that were read, or raises `EntryDamaged` or OSError: then the blocks'
        content is anything."""
        future = self._pool.submit(self._load, load)
        future.add_done_callback(lambda _: on_progress())
        return future

    def release(self, transfer_id: str) -> None:
        """Removes a transfer, taken or not."""
        self._pool.submit(self._release, self._base / transfer_id)

    def close(self) -> None:
        self._pool.shutdown()

    def _load(self, load: BlockLoad) -> int:
        directory = self._claim(self._base / load.transfer_id)
        num_bytes, begin = 0, 0
        for end in load.ends:
            blocks = BlockRange(self._identity, load.digest, begin, end)
            if end > load.first:
                self._load_range(load, blocks, directory)
                num_bytes += blocks.layer_bytes * self._identity.num_layers
            begin = end
        return num_bytes

    def _load_range(self, load: BlockLoad, blocks: BlockRange, directory: Path) -> None:
        skip = max(0, load.first - blocks.first)
        wanted = load.block_ids[blocks.first + skip - load.first : blocks.end - load.first]
        ids = torch.tensor(wanted, device=self._cache.device)
        for (keys, values), (k, v) in zip(
            self._cache.layers, read_blocks(blocks, directory / blocks.name, skip), strict=True
        ):
            keys.index_copy_(0, ids, k.to(keys.device))
            values.index_copy_(0, ids, v.to(values.device))

    def _claim(self, directory: Path) -> Path:
        """Takes the transfer out of its producer's lease. One that is taken already, by this instance before
        a preemption or by one that died, is as good."""
        claimed = pulled(directory)
        for wait in RECHECK if self._patient else RECHECK[:1]:
            time.sleep(wait)
            try:
                os.rename(directory, claimed)
            except FileNotFoundError:
                if claimed.is_dir():
                    return claimed
                refresh_directory(self._base)
                continue
            os.utime(claimed)  # its age counts from now
            return claimed
        raise EntryDamaged("it is not there any more")

    def _release(self, directory: Path) -> None:
        remove_quietly(directory)
        remove_quietly(pulled(directory))
