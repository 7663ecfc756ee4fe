"""Saves in the background: what arrives while one batch goes to the disk is the next batch.

So a lone save starts at once, and the saves of a busy step share their flushes.
"""

from collections import deque
from concurrent.futures import Future
from threading import Condition, Thread

from epd_engine.ec_store.file_store import FileStore, NewEntry

THREADS = 2  # one writes while the other waits for the disk
MAX_BATCH = 32  # entries, and so open files, of one batch
MAX_PENDING_BYTES = 512 << 20


class GroupCommit:
    """A bounded queue of saves in front of a `FileStore`. Thread-safe."""

    def __init__(
        self, store: FileStore, *, max_pending_bytes: int = MAX_PENDING_BYTES, threads: int = THREADS
    ):
        self._store, self._max_pending = store, max_pending_bytes
        self._queue: deque[tuple[NewEntry, Future[None]]] = deque()
        self._pending = 0  # bytes that wait or are being saved
        self._closed = False
        self._changed = Condition()
        self._threads = [Thread(target=self._run, name="ec-save", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, entry: NewEntry) -> Future[None]:
        """Saves `entry` soon; its tensor must not change before the future is done.

        The future raises what `FileStore.save` does. Blocks while more than `max_pending_bytes` wait, a lone
        larger entry excepted. Raises RuntimeError once closed.
        """
        size = entry.tensor.nbytes
        future: Future[None] = Future()
        with self._changed:
            while self._pending and self._pending + size > self._max_pending and not self._closed:
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the save queue is closed")
            self._pending += size
            self._queue.append((entry, future))
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Finishes what is queued, then ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while batch := self._take():
            try:
                failures = self._store.save_many([entry for entry, _ in batch])
            except BaseException as error:  # noqa: BLE001 - whoever waits for a future must hear of it
                for _, future in batch:
                    future.set_exception(error)
            else:
                for entry, future in batch:
                    if entry.key in failures:
                        future.set_exception(failures[entry.key])
                    else:
                        future.set_result(None)
            with self._changed:
                self._pending -= sum(entry.tensor.nbytes for entry, _ in batch)
                self._changed.notify_all()

    def _take(self) -> list[tuple[NewEntry, "Future[None]"]]:
        """What is queued, at most `MAX_BATCH`; nothing once closed and empty."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
