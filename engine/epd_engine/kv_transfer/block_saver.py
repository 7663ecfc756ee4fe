"""Saves of KV in the background: a layer goes to its file while the next ones are computed."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition

import torch

from epd_engine.ec_store.kv_area import PULLED, remove
from epd_engine.kv_transfer.block_file import BlockFileWriter, BlockRange

log = logging.getLogger(__name__)

LANES = 2  # one writes while the other waits for the disk
MAX_PENDING_BYTES = 256 << 20


@dataclass
class Transfer:
    """One prompt's files. `failure` is the first thing that went wrong, `is_saved` whether all is in place;
    both are set by its lane. `is_reported`: the scheduler side has heard of it."""

    transfer_id: str
    directory: Path
    writer: BlockFileWriter | None = field(default=None, init=False)
    failure: str | None = field(default=None, init=False)
    is_saved: bool = field(default=False, init=False)
    is_reported: bool = field(default=False, init=False)

    @property
    def is_done(self) -> bool:
        return self.is_saved or self.failure is not None


class BlockSaver:
    """Threads that write, and remove. What is said of one transfer is done in that order."""

    def __init__(self, *, fsync: bool, on_progress: Callable[[], None]):
        self._fsync, self._on_progress = fsync, on_progress
        self._lanes = [ThreadPoolExecutor(1, "kv-save") for _ in range(LANES)]
        self._pending = 0  # bytes of layers that wait or are being written
        self._changed = Condition()

    def write(self, transfer: Transfer, blocks: BlockRange, layer: int, tensor: torch.Tensor) -> None:
        """`tensor` is ours. Waits while more than `MAX_PENDING_BYTES` are pending."""
        with self._changed:
            while self._pending and self._pending + tensor.nbytes > MAX_PENDING_BYTES:
                self._changed.wait()
            self._pending += tensor.nbytes
        self._lane(transfer.transfer_id).submit(self._write, transfer, blocks, layer, tensor)

    def publish(self, transfer: Transfer, *, last: bool) -> None:
        """The layers of one range have been handed over; `last`: so has everything of the transfer."""
        self._lane(transfer.transfer_id).submit(self._publish, transfer, last)

    def drop(self, transfer: Transfer) -> None:
        """Removes a transfer that has not been taken, whatever state it is in."""
        self._lane(transfer.transfer_id).submit(self._drop, transfer)

    def run(self, task: Callable[[], None]) -> None:
        """Some other work on the volume, beside the saves."""
        self._lanes[0].submit(task)

    def close(self) -> None:
        for lane in self._lanes:
            lane.shutdown()

    def _lane(self, transfer_id: str) -> ThreadPoolExecutor:
        return self._lanes[int(transfer_id[:8], 16) % LANES]

    def _write(self, transfer: Transfer, blocks: BlockRange, layer: int, tensor: torch.Tensor) -> None:
        try:
            if transfer.failure is None:
                if transfer.writer is None:
                    transfer.writer = BlockFileWriter(blocks, transfer.directory)
                transfer.writer.write(layer, tensor)
        except OSError as error:
            self._fail(transfer, error)
        finally:
            with self._changed:
                self._pending -= tensor.nbytes
                self._changed.notify_all()

    def _publish(self, transfer: Transfer, last: bool) -> None:
        try:
            if transfer.writer is not None:
                transfer.writer.publish(self._fsync)
                transfer.writer = None
        except OSError as error:
            self._fail(transfer, error)
        if transfer.failure is None:
            transfer.is_saved = last
        if last or transfer.failure is not None:
            self._on_progress()

    def _fail(self, transfer: Transfer, error: OSError) -> None:
        log.error("KV cannot be saved in %s: %s", transfer.directory.parent, error)
        transfer.failure = transfer.failure or str(error.strerror)
        if transfer.writer is not None:
            transfer.writer.discard()
            transfer.writer = None

    def _drop(self, transfer: Transfer) -> None:
        if transfer.writer is not None:
            transfer.writer.discard()
            transfer.writer = None
        remove_quietly(transfer.directory)


def remove_quietly(directory: Path) -> None:
    """What the volume does not let us remove is left to the janitor."""
    try:
        remove(directory)
    except OSError as error:
        log.warning("%s cannot be removed: %s", directory, error)


def pulled(directory: Path) -> Path:
    """What a transfer's directory is called once it is taken."""
    return directory.with_name(directory.name + PULLED)
