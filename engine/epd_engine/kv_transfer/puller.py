"""Decode's side of pulls: reads a prompt's blocks out of prefill's memory into its own pool."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from epd_engine.attention.kv_cache import KVCache
from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError
from epd_engine.kv_transfer.nixl_pool import PoolAgent, PoolView, PullError
from epd_engine.kv_transfer.side_channel import Channel

log = logging.getLogger(__name__)

THREADS = 4
CONNECT_SECONDS = 3.0
MAX_PEERS = 32  # of an agent, which costs two open files for each


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
    """Threads that pull. Each has an agent for the time of a read, if it can the one that was used last: what
    prefill instances that knows needs no new connection.

    NIXL frees nothing of a peer that it is told to forget, only of an agent that is closed. So an agent is
    closed once it has met `MAX_PEERS`: what dead prefill instances leave is bounded. One whose read failed is
    closed at once, so that what comes late from its peer finds nothing to be written to.
    """

    def __init__(self, identity: KVModelIdentity, cache: KVCache, *, pull_seconds: float):
        """`pull_seconds`: how long one pull may take. Raises `KVConfigError` where NIXL cannot be used."""
        self._identity, self._cache, self._seconds = identity, cache, pull_seconds
        self._idle = [PoolAgent(cache, identity)]  # the last one was used last
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
        for agent in self._idle:
            agent.close()

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
        for is_last in (False, True):
            agent = self._new_agent() if is_last else self._take_agent()
            try:
                num_bytes = agent.read(view, theirs, ours, deadline)
            except PullError:
                agent.close()
                if is_last or time.monotonic() >= deadline:
                    raise
            else:
                self._give_back(agent)
                return num_bytes
        raise AssertionError("the last one returns or raises")

    def _take_agent(self) -> PoolAgent:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new_agent()

    def _new_agent(self) -> PoolAgent:
        try:
            return PoolAgent(self._cache, self._identity)
        except KVConfigError as error:  # it could be used at start
            raise PullError(str(error)) from error

    def _give_back(self, agent: PoolAgent) -> None:
        if agent.num_peers < MAX_PEERS:
            self._idle.append(agent)
        else:
            agent.close()

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
