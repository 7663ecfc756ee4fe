"""The PD stage: open an answer, and tell a missing encoder cache entry from other failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import orjson

from epd_proxy.config import Limits
from epd_proxy.errors import EngineAnswer
from epd_proxy.http1 import Disconnected, Reply, UpstreamError
from epd_proxy.jsonbody import Chunks
from epd_proxy.pool import Instance, Lease
from epd_proxy.sse import EventBuffer, is_role_only, is_server_error, payloads
from epd_proxy.upstream import CHAT_PATH, MAX_ANSWER, Role, busy, call_headers


class Missed(Exception):
    """A PD lacks an encoder cache entry, or failed in a way that a miss may look like."""


@dataclass(frozen=True, slots=True)
class PdCall:
    """One request to a PD. `metadata_only`: all its media are keys, so any failure may be a miss."""

    body: Chunks
    request_id: str
    authorization: bytes | None
    stream: bool
    metadata_only: bool


class Opened:
    """An answer that has begun: `head` is the whole body, or the first events of a stream.

    For a stream `events` holds what is still incomplete, and `reply` has the rest. A context manager: leaving
    it releases the PD, and cuts a stream that is not over.
    """

    def __init__(self, reply: Reply, head: bytes, events: EventBuffer | None) -> None:
        self.reply = reply
        self.head = head
        self.events = events
        self.lease: Lease

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()
        self.lease.release()


class Pds:
    """Chat completions on the instances of the PD role."""

    def __init__(self, role: Role, limits: Limits) -> None:
        self.role = role
        self._limits = limits

    async def open(self, call: PdCall) -> Opened:
        """Send to a PD, or to another one after it, until the answer has begun.

        Raises Missed, EngineAnswer with an engine's own error, or ProxyError.
        """
        lease = self.role.lease()
        try:
            opened = await self.role.call(lease, call.request_id, partial(self._attempt, call))
        except BaseException:
            lease.release()
            raise
        opened.lease = lease
        return opened

    async def _attempt(self, call: PdCall, instance: Instance, _: bool) -> Opened:
        limit = self._limits.first_token if call.stream else self._limits.answer
        headers = call_headers(call.request_id, call.authorization)
        try:
            async with asyncio.timeout(limit):
                reply = await self.role.client.request(instance.origin, "POST", CHAT_PATH, headers, call.body)
                try:
                    return await self._begin(reply, call)
                except BaseException:
                    reply.close()
                    raise
        except TimeoutError:
            # Not repeated: the PD may be at work on it, and a second one would double the load.
            failed = self.role.timed_out(instance, "first token" if call.stream else "answer", limit)
            self.role.report(instance, failed, call.request_id)
            raise failed.final from None
        except UpstreamError as error:
            failed = self.role.broken(instance, error)
            if not isinstance(error, Disconnected):
                raise failed from error
            if call.metadata_only:
                self.role.report(instance, failed, call.request_id)
                raise Missed from error
            if error.started:
                self.role.report(instance, failed, call.request_id)
                raise failed.final from error
            raise failed from error

    async def _begin(self, reply: Reply, call: PdCall) -> Opened:
        if not is_event_stream(reply):
            body = await reply.read(MAX_ANSWER)
            if reply.status >= 400:
                raise _refusal(EngineAnswer(reply.status, reply.headers, body), call.metadata_only)
            return Opened(reply, body, None)
        events, head = EventBuffer(), b""
        while not head or (call.metadata_only and all(map(is_role_only, payloads(head)))):
            data = await reply.chunk()
            head += events.feed(data) if data else events.flush()
            if not data:
                break
        if call.metadata_only:
            first = next((said for said in payloads(head) if not is_role_only(said)), None)
            if is_server_error(first):
                raise Missed
        return Opened(reply, head, events)


def is_event_stream(reply: Reply) -> bool:
    return reply.status == 200 and (reply.header(b"content-type") or b"").startswith(b"text/event-stream")


def _refusal(answer: EngineAnswer, metadata_only: bool) -> Exception:
    """What an error status of a PD means for the request."""
    if answer.status == 503 and _code(answer.body) == "ec_miss":
        return Missed()
    if answer.status == 500 and metadata_only:
        return Missed()  # all that vLLM says about one
    return busy(answer) if answer.status in (429, 503) else answer


def _code(body: bytes) -> object:
    try:
        return orjson.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
