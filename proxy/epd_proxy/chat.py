"""The course of one chat completion: body, primers, rewriting, language model, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from epd_proxy import logs
from epd_proxy.answers import Missed, Opened
from epd_proxy.asgi import Buffer, ClientGone, Receive, Response, Scope, Send, Share, read_body
from epd_proxy.config import Limits
from epd_proxy.door import Caller, Door
from epd_proxy.encoders import PrimerCall
from epd_proxy.errors import BadRequest, EcMiss, EngineAnswer, ProxyError, Unavailable
from epd_proxy.http1 import UpstreamError
from epd_proxy.jsonbody import Chunks, JsonBody
from epd_proxy.language import ChatCall, Language, Trail
from epd_proxy.media import ChatBody, Primed, digest, key_text, named, read_chat, rewrite
from epd_proxy.metrics import Metrics
from epd_proxy.primers import Key, Primers
from epd_proxy.sse import EventBuffer

_HASH_IN_THREAD = 256 * 1024
"""Digests of longer items (bytes) are taken in a thread: 8 MB keep the event loop for some 8 ms."""


class ChatCompletions:
    """`POST /v1/chat/completions`, as a raw ASGI endpoint."""

    def __init__(
        self, door: Door, primers: Primers, language: Language, limits: Limits, metrics: Metrics
    ) -> None:
        self.door = door
        self.buffer = Buffer(limits.max_buffered)
        metrics.buffered.set_function(lambda: self.buffer.held)
        self.primers = primers
        self.language = language
        self.limits = limits
        self.metrics = metrics
        self._in_flight = 0

    async def serve(self, request_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request; every end is an answer, an error body, or an error event in the stream."""
        course = Course(self, request_id, dict(scope["headers"]), Response(send, request_id))
        self._in_flight += 1
        self.metrics.in_flight.inc()
        try:
            if self._in_flight > self.limits.max_in_flight:
                full = ProxyError(429, "too many requests in flight", code="too_many_requests", retry_after=1)
                await course.response.fail(full)
            else:
                await course.run(receive)
        finally:
            course.share.release()
            self._in_flight -= 1
            self.metrics.in_flight.dec()
            course.record()


class Course:
    """One request from its head to its last byte."""

    def __init__(
        self, home: ChatCompletions, request_id: str, headers: dict[bytes, bytes], response: Response
    ) -> None:
        self.response = response
        self.share = Share(home.buffer)
        self._home = home
        self._limits = home.limits
        self._id = request_id
        self._headers = headers
        self._began = time.perf_counter()
        self._trail = Trail()
        self._client_gone = False
        self._caller: Caller | None = None

    async def run(self, receive: Receive) -> None:
        """Serve until the end, or until the client leaves, which cancels the calls made for it alone."""
        serving = asyncio.current_task()
        assert serving is not None
        try:
            await self._answer_or_fail(receive, serving)
        except ClientGone:
            self._client_gone = True
        except asyncio.CancelledError:
            if not self._client_gone:
                stopping = ProxyError(503, "the proxy is shutting down", code="shutting_down", retry_after=1)
                await self.response.fail(stopping)
                raise
            serving.uncancel()

    async def _answer_or_fail(self, receive: Receive, serving: asyncio.Task[None]) -> None:
        try:
            await self._answer(receive, serving)
        except ProxyError as error:
            await self._fail(error)
        except EngineAnswer as answer:
            await self.response.whole(answer.status, answer.headers, answer.body)
        except ClientGone:
            raise
        except Exception:  # noqa: BLE001 - the last line: a defect of ours still ends in an answer
            logs.failure("internal_error", request_id=self._id)
            await self._fail(ProxyError(500, "internal error of the proxy", code="internal_error"))

    async def _fail(self, error: ProxyError) -> None:
        try:
            async with asyncio.timeout(self._limits.idle):
                await self.response.fail(error)
        except TimeoutError:
            raise ClientGone from None  # it does not even read the error

    async def _answer(self, receive: Receive, serving: asyncio.Task[None]) -> None:
        self._caller = self._home.door.admit(self._headers)
        # No variable here holds the body: its megabytes go as soon as the answer has begun.
        opening = self._open(await read_body(self._headers, receive, self._limits, self.share))
        watch = asyncio.get_running_loop().create_task(self._watch(receive, serving))
        try:
            with await opening as opened:
                self.share.release()
                waited = time.perf_counter() - self._began
                self._home.metrics.ttft.observe(waited)
                self._trail.facts |= {
                    "ttft_s": round(waited, 6),
                    opened.role.name: opened.lease.instance.origin.url,
                }
                reply = opened.reply
                if opened.events is None:
                    await self.response.whole(reply.status, reply.headers, opened.head)
                else:
                    await self.response.start(reply.status, reply.headers)
                    await self._relay(opened, opened.events)
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive, serving: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        serving.cancel()

    async def _open(self, raw: bytes) -> Opened:
        try:
            body = JsonBody(raw)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
        chat = read_chat(body.doc, self._limits.max_items)
        if chat.items:
            return await self._open_media(body, chat)
        doc = rewrite(body.doc, (), ())[0] if chat.has_uuid else body.doc
        own = None if chat.has_uuid else raw
        try:
            return await self._ask(body, doc, own, chat.stream, metadata_only=False)
        except Missed:
            raise EcMiss from None

    async def _open_media(self, body: JsonBody, chat: ChatBody) -> Opened:
        self._trail.facts["items"] = len(chat.items)
        self._home.metrics.media_items.inc(len(chat.items))
        for role in self._home.language.roles:
            if not role.pool.ready():
                raise Unavailable(role.name, "is ready")
        if self._caller is not None:
            # On media alone: it keeps tenants apart in the encoder cache, and text goes on as it came.
            body.doc["cache_salt"] = self._caller.salt(body.doc.get("cache_salt"))
        keys = [await _key(key_text(body, item)) for item in chat.items]
        items = [named(item, key) for item, key in zip(chat.items, keys, strict=True)]
        call = PrimerCall(body, self._id, self._home.door.passed_on(self._headers))
        missed: list[Primed] | None = None
        for again in (False, True):
            self._trail.stage = "encoder"
            began = time.perf_counter()
            primed = await self._home.primers.prime(call, items, keys, missed=missed)
            self._trail.facts["primer_s"] = _since(began)
            document, metadata_only = rewrite(body.doc, items, primed)
            try:
                return await self._ask(body, document, None, chat.stream, metadata_only)
            except Missed as error:
                logs.warning("ec_miss", request_id=self._id, again=again, reason=str(error))
                missed = primed
                if not again:
                    self._home.metrics.reprimes.inc()
        raise EcMiss

    async def _ask(
        self, body: JsonBody, doc: Mapping[str, Any], raw: bytes | None, stream: bool, metadata_only: bool
    ) -> Opened:
        authorization = self._home.door.passed_on(self._headers)
        call = ChatCall(body, doc, raw, stream, metadata_only, self._id, authorization, self._trail)
        return await self._home.language.open(call)

    async def _relay(self, opened: Opened, events: EventBuffer) -> None:
        """Pass a stream on as it comes; one that breaks off ends with an error event.

        Raises ProxyError when the instance is at fault, ClientGone when the client no longer reads.
        """
        role, instance = opened.role, opened.lease.instance
        loop, idle = asyncio.get_running_loop(), self._limits.idle
        writing = True
        try:
            async with asyncio.timeout(idle) as limit:
                whole = opened.head
                while True:
                    if whole:
                        await self.response.write(whole)
                    writing = False
                    limit.reschedule(loop.time() + idle)
                    data = await opened.reply.chunk()
                    writing = True
                    if not data:
                        break
                    whole = events.feed(data)
                await self.response.end(events.flush())
                return
        except TimeoutError:
            if writing:
                raise ClientGone from None
            failed = role.timed_out(instance, "between two events", idle)
        except UpstreamError as error:
            failed = role.broken(instance, error)
        role.report(instance, failed, self._id)
        raise failed.final

    def record(self) -> None:
        """Count and log the request, once it is over."""
        status = 499 if self._client_gone else self.response.status
        self._home.metrics.requests.labels(str(status), self._trail.stage).inc()
        if self._caller is not None:
            self._home.door.count(self._caller)
            self._trail.facts |= {"key": self._caller.key, "tenant": self._caller.tenant}
        logs.info(
            "request",
            request_id=self._id,
            status=status,
            stage=self._trail.stage,
            total_s=_since(self._began),
            **self._trail.facts,
        )


async def _key(text: Chunks) -> Key:
    if sum(map(len, text)) < _HASH_IN_THREAD:
        return digest(text)
    return await asyncio.to_thread(digest, text)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 6)
