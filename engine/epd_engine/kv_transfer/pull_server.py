"""Prefill's side of pulls: keeps a prompt's blocks on offer until a decode instance has them."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from epd_engine.kv_transfer.base import KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError
from epd_engine.kv_transfer.nixl_pool import PoolAgent
from epd_engine.kv_transfer.side_channel import frame, read_frame

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.001  # between two looks after the agent, while somebody pulls


@dataclass(frozen=True)
class Offer:
    """The blocks of a whole prompt whose `prompt_digest` is `digest`."""

    request_id: str
    transfer_id: str
    digest: str
    block_ids: tuple[int, ...]


@dataclass
class Ended:
    """Requests whose blocks are nobody's any more: pulled, or never, for a reason."""

    pulled: dict[str, int] = field(default_factory=dict)
    """With the number of blocks that were read."""
    unclaimed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Offered:
    offer: Offer
    lease: asyncio.TimerHandle
    is_over: bool = False
    is_pulled: bool = False
    """Somebody is about it: the lease waits for the outcome, which has a time limit of its own."""


class Refused(Exception):
    """Why a peer's request is not granted, in words for it."""


class PullServer:
    """A thread that waits for decode instances, and owns the agent whose memory they read.

    The agent is looked after only while somebody pulls: at rest the thread sleeps.
    """

    def __init__(
        self,
        identity: KVModelIdentity,
        agent: PoolAgent,
        address: tuple[str, int],
        *,
        lease_seconds: float,
        pull_seconds: float,
        on_progress: Callable[[], None],
    ):
        """`pull_seconds`: how long one pull may take. Raises `KVConfigError` for an address that cannot be
        bound."""
        self._identity, self._agent = identity, agent
        self._lease_seconds, self._pull_seconds = lease_seconds, pull_seconds
        self._on_progress = on_progress
        self._offers: dict[str, _Offered] = {}
        self._pulls = 0
        self._ended, self._lock = Ended(), threading.Lock()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(asyncio.start_server(self._talk, *address))
        except OSError as error:
            raise KVConfigError(f"kv_ip {address[0]}, kv_port {address[1]}: {error.strerror}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-serve", daemon=True)
        self._thread.start()

    # For the engine's thread

    def offer(self, offer: Offer) -> None:
        self._loop.call_soon_threadsafe(self._offer, offer)

    def withdraw(self, transfer_id: str) -> None:
        """Nobody was told of it; its blocks are free already."""
        self._loop.call_soon_threadsafe(self._forget, transfer_id)

    def take_ended(self) -> Ended:
        with self._lock:
            ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the thread

    def _offer(self, offer: Offer) -> None:
        lease = self._loop.call_later(self._lease_seconds, self._end_lease, offer.transfer_id)
        self._offers[offer.transfer_id] = _Offered(offer, lease)

    def _forget(self, transfer_id: str) -> _Offered | None:
        offered = self._offers.pop(transfer_id, None)
        if offered is not None:
            offered.lease.cancel()
        return offered

    def _end_lease(self, transfer_id: str) -> None:
        offered = self._offers[transfer_id]
        offered.is_over = True
        if not offered.is_pulled:
            self._end(transfer_id, "nobody came for it before its lease ended")

    def _end(self, transfer_id: str, failure: str | None, num_blocks: int = 0) -> None:
        offered = self._forget(transfer_id)
        assert offered is not None, "on offer until now"
        request_id = offered.offer.request_id
        with self._lock:
            if failure is None:
                self._ended.pulled[request_id] = num_blocks
            else:
                log.warning("the prompt's KV was not pulled: %s", failure, extra={"request_id": request_id})
                self._ended.unclaimed[request_id] = failure
        self._on_progress()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._pull_seconds):
                try:
                    await self._serve(await read_frame(reader), reader, writer)
                except Refused as refusal:
                    writer.write(frame({"refused": str(refusal)}))
                await writer.drain()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            log.warning("a decode instance broke off: %r", error)
        finally:
            writer.close()

    async def _serve(
        self, asked: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        offered = self._find(asked)
        offer = offered.offer
        if asked.get("purpose") == "drop":
            self._end(offer.transfer_id, "its request ended before")
            writer.write(frame({"released": True}))
            return
        first = self._first_block(asked, offer)
        offered.is_pulled = True
        self._pulls += 1
        if self._pulls == 1:
            self._progressing = self._loop.create_task(self._progress())
        try:
            view = self._agent.view.to_json()
            writer.write(frame({"view": view, "blocks": offer.block_ids[first:]}))
            if (await read_frame(reader)).get("done") is not True:
                raise ValueError("neither done nor gone")
            if self._offers.get(offer.transfer_id) is not offered:
                raise Refused("the blocks were given to others meanwhile")
            self._end(offer.transfer_id, None, len(offer.block_ids) - first)
            writer.write(frame({"released": True}))
        finally:
            self._pulls -= 1
            offered.is_pulled = False
            if offered.is_over and self._offers.get(offer.transfer_id) is offered:
                self._end(offer.transfer_id, "its lease ended while it was being pulled")

    def _find(self, asked: Mapping[str, Any]) -> _Offered:
        offered = self._offers.get(str(asked.get("transfer")))
        if offered is None:
            raise Refused("it is not there any more")
        if offered.is_pulled:
            raise Refused("another instance is pulling it")
        return offered

    def _first_block(self, asked: Mapping[str, Any], offer: Offer) -> int:
        """From which block on the prompt is asked for."""
        if asked.get("purpose") != "pull" or not isinstance(asked.get("compatibility"), dict):
            raise Refused("neither a pull nor a drop")
        if difference := self._identity.difference(asked["compatibility"]):
            raise Refused(f"its form does not fit: {difference}")
        if asked.get("digest") != offer.digest:
            raise Refused("it is another prompt's")
        first = asked.get("first")
        if type(first) is not int or not 0 <= first < len(offer.block_ids):
            raise Refused("the prompt has no such blocks")
        return first

    async def _progress(self) -> None:
        while self._pulls:
            try:
                self._agent.progress()
            except Exception as error:  # noqa: BLE001 - NIXL's have no base; a peer that died is no end of us
                log.warning("NIXL: %r", error)
            await asyncio.sleep(PROGRESS_SECONDS)

    async def _close(self) -> None:
        self._server.close()
        for task in asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            task.cancel()
