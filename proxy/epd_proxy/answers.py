"""The stage that answers: open an answer, and tell missing entries of a cache from other failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

import orjson

from epd_proxy.errors import EngineAnswer, KvIncompatible
from epd_proxy.http1 import Disconnected, Reply, UpstreamError
from epd_proxy.jsonbody import Chunks
from epd_proxy.pool import Instance, Lease
from epd_proxy.sse import EventBuffer, is_role_only, is_server_error, payloads
from epd_proxy.upstream import CHAT_PATH, MAX_ANSWER, Failed, Role, busy, call_headers


class Missed(Exception):
    """An instance lacks what others stored for the request, or failed in a way that this may look like.

    It says why in the instance's words; `instance` is the one, where `Answers.open` raises it.
    """

    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """One request to an instance that answers.

    `may_miss`: it rests on what others stored alone (encoder cache entries, KV), so any failure may be a
    miss.
    """

    body: Chunks
    request_id: str
    authorization: bytes | None
    stream: bool
    may_miss: bool


class Opened:
    """An answer that has begun: `head` is the whole body, or the first events of a stream.

    For a stream `events` holds what is still incomplete, and `reply` has the rest. A context manager: leaving
    it releases the instance, and cuts a stream that is not over.
    """

    def __init__(self, role: Role, reply: Reply, head: bytes, events: EventBuffer | None) -> None:
        self.role = role
        self.reply = reply
        self.head = head
        self.events = events
        self.lease: Lease

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()
        self.lease.release()


class Answers:
    """Chat completions on the instances of a role: PD, or decode.

    `first_event` and `whole` are the seconds until a stream's first event, and until an answer that is not
    streamed.
    """

    def __init__(self, role: Role, first_event: float, whole: float) -> None:
        self.role = role
        self._first_event = first_event
        self._whole = whole

    async def open(
        self,
        call: AnswerCall,
        avoid: Collection[Instance] = (),
        heard: Callable[[Instance, Failed], None] = lambda instance, failure: None,
    ) -> Opened:
        """Send to an instance, or to another one after it, until the answer has begun.

        One to `avoid` is asked only where there is no other; `heard` is told of each that another one may
        make good. Raises Missed, EngineAnswer with an engine's own error, or ProxyError.
        """

        async def attempt(instance: Instance, _: bool) -> Opened:
            try:
                return await self._attempt(call, instance)
            except Failed as failure:
                heard(instance, failure)
                raise

        lease = self.role.lease(avoid=avoid)
        try:
            opened = await self.role.call(lease, call.request_id, attempt, avoid)
        except BaseException as error:
            if isinstance(error, Missed):
                error.instance = lease.instance
            lease.release()
            raise
        opened.lease = lease
        return opened

    async def _attempt(self, call: AnswerCall, instance: Instance) -> Opened:
        limit = self._first_event if call.stream else self._whole
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
            # Not repeated: the instance may be at work on it, and a second one would double the load.
            failed = self.role.timed_out(instance, "first token" if call.stream else "answer", limit)
            self.role.report(instance, failed, call.request_id)
            raise failed.final from None
        except UpstreamError as error:
            failed = self.role.broken(instance, error)
            if not isinstance(error, Disconnected):
                raise failed from error
            if call.may_miss:
                self.role.report(instance, failed, call.request_id)
                raise Missed(str(failed.final)) from error
            if error.started:
                self.role.report(instance, failed, call.request_id)
                raise failed.final from error
            raise failed from error

    async def _begin(self, reply: Reply, call: AnswerCall) -> Opened:
        if not is_event_stream(reply):
            body = await reply.read(MAX_ANSWER)
            if reply.status >= 400:
                raise refusal(EngineAnswer(reply.status, reply.headers, body), call.may_miss)
            return Opened(self.role, reply, body, None)
        events, head = EventBuffer(), b""
        while not head or (call.may_miss and all(map(is_role_only, payloads(head)))):
            data = await reply.chunk()
            head += events.feed(data) if data else events.flush()
            if not data:
                break
        if call.may_miss:
            first = next((said for said in payloads(head) if not is_role_only(said)), None)
            if first is not None and is_server_error(first):
                raise Missed(str(first["error"].get("message", ""))[:500])
        return Opened(self.role, reply, head, events)


def is_event_stream(reply: Reply) -> bool:
    return reply.status == 200 and (reply.header(b"content-type") or b"").startswith(b"text/event-stream")


def refusal(answer: EngineAnswer, may_miss: bool) -> Exception:
    """What an error status of an instance means for the request."""
    code, message = _error(answer.body)
    if answer.status == 503 and code in ("ec_miss", "kv_miss"):
        return Missed(message)
    if code == "kv_incompatible":
        # Nothing was taken over, and no other request is like this one to the instance: not counted as sent.
        return Failed(KvIncompatible(message), "kv_incompatible", sent=False)
    if answer.status == 500 and may_miss:
        return Missed(message)  # all that vLLM says about one
    return busy(answer) if answer.status in (429, 503) else answer


def _error(body: bytes) -> tuple[object, str]:
    """Code and message of an error body; None and nothing where it is none."""
    try:
        error = orjson.loads(body)["error"]
        return error["code"], str(error.get("message", ""))[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, ""
