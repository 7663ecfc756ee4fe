"""Decode's side of pulls: reads a prompt's blocks out of prefill's memory into its own pool."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.nixl_pool import PoolAgent, PoolView, PullError
from epd_engine.kv_transfer.side_channel import Channel
from epd_engine.worker.paged_attention import KVCache

log = logging.getLogger(__name__)

THREADS = 4
CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Source:
    """Where a prompt's KV is on offer."""

    host: str
    port: int
    transfer_id: str


@dataclass(frozen=True)
class BlockPull:
    """Blocks of a prompt from `first` on, into `block_ids`; `tokens_in_last` tokens are in its last."""

    request_id: str
    source: Source
    digest: str
    first: int
    block_ids: tuple[int, ...]
    tokens_in_last: int


class Puller:
    """Threads that pull, each with agents of its own, one for each prefill instance. One whose read failed
    is closed, so that what comes late from its peer finds nothing to be written to."""

    def __init__(self, identity: KVModelIdentity, cache: KVCache, *, pull_seconds: float):
        """`pull_seconds`: how long one pull may take. Raises `KVConfigError` where NIXL cannot be used."""
        self._identity, self._cache, self._seconds = identity, cache, pull_seconds
        PoolAgent(cache, identity)  # loads its libraries, and tells a problem at start
        self._agents = threading.local()
        self._pool = ThreadPoolExecutor(THREADS, "kv-pull")

    def pull(self, pull: BlockPull, on_progress: Callable[[], None]) -> "Future[int]":
        """The future has the bytes that were read, or raises `PullError`: then the blocks hold anything."""
        future = self._pool.submit(self._pull, pull)
        future.add_done_callback(lambda _: on_progress())
        return future

    def drop(self, source: Source) -> None:
        """Nobody will pull it."""
        self._pool.submit(self._drop, source)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _pull(self, pull: BlockPull) -> int:
        deadline = time.monotonic() + self._seconds
        with Channel(pull.source.host, pull.source.port, min(CONNECT_SECONDS, self._seconds)) as channel:
            asked = {
                "purpose": "pull",
                "transfer": pull.source.transfer_id,
                "digest": pull.digest,
                "first": pull.first,
                "compatibility": self._identity.compatibility,
            }
            said = channel.ask(asked, deadline - time.monotonic())
            if not _are_blocks(said.get("blocks"), len(pull.block_ids)):
                raise PullError("prefill's answer does not name the prompt's blocks")
            view = PoolView.from_json(said.get("view") or {}, self._identity)
            num_bytes = self._read(view, said["blocks"], pull.block_ids, deadline)
            self._blank_tail(pull)
            channel.ask({"done": True}, deadline - time.monotonic())
        return num_bytes

    def _read(self, view: PoolView, theirs: list[int], ours: tuple[int, ...], deadline: float) -> int:
        """With a new agent once more: what went before may have left a broken connection to the peer."""
        agents = vars(self._agents)
        for is_last in (False, True):
            if view.agent not in agents:
                agents[view.agent] = PoolAgent(self._cache, self._identity)
            agent: PoolAgent = agents[view.agent]
            try:
                return agent.read(view, theirs, ours, deadline)
            except PullError:
                del agents[view.agent]
                agent.close()
                if is_last or time.monotonic() >= deadline:
                    raise
        raise AssertionError("the last one returns or raises")

    def _blank_tail(self, pull: BlockPull) -> None:
        """What lies behind the prompt's end in its last block was another request's once."""
        for keys, values in self._cache.layers:
            keys[pull.block_ids[-1], :, pull.tokens_in_last :] = 0
            values[pull.block_ids[-1], :, pull.tokens_in_last :] = 0

    def _drop(self, source: Source) -> None:
        try:
            with Channel(source.host, source.port, CONNECT_SECONDS) as channel:
                channel.ask({"purpose": "drop", "transfer": source.transfer_id}, CONNECT_SECONDS)
        except PullError as error:
            log.info("left to the end of its lease: %s", error)


def _are_blocks(said: object, number: int) -> bool:
    return isinstance(said, list) and len(said) == number and all(type(b) is int and b >= 0 for b in said)
