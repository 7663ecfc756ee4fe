"""A role as the proxy calls it: its instances, its client, and when another instance is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from epd_proxy import logs
from epd_proxy.config import Origin
from epd_proxy.errors import EngineAnswer, Headers, ProxyError, Unavailable
from epd_proxy.http1 import Client, Disconnected, Garbled, Unreachable, UpstreamError
from epd_proxy.jsonbody import Chunks
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Instance, Lease, Pool

CHAT_PATH = "/v1/chat/completions"
MAX_ANSWER = 64 << 20
"""Bytes of one answer that is held whole."""

_MAX_TRIED = 3

T = TypeVar("T")


class Failed(Exception):
    """An attempt failed and another instance may do better.

    `final` is the client's answer when there is none; `sent` says that the instance may have seen the
    request, and such a request is repeated only once.
    """

    def __init__(self, final: ProxyError | EngineAnswer, kind: str, sent: bool) -> None:
        super().__init__(kind)
        self.final = final
        self.kind = kind
        self.sent = sent


class Role:
    """The instances of one role behind one client."""

    def __init__(
        self, name: str, origins: Sequence[Origin], connect_timeout: float, metrics: Metrics
    ) -> None:
        self.name = name
        self.pool = Pool(name, origins)
        self.client = Client(connect_timeout)
        self._metrics = metrics
        metrics.instances.labels(name).set_function(lambda: len(self.pool))
        metrics.instances_ready.labels(name).set_function(lambda: len(self.pool.ready()))

    def lease(self, size: int = 1, avoid: Collection[Instance] = ()) -> Lease:
        """The instance for the next piece of work. Raises Unavailable when none is ready."""
        instance = self.pool.pick(avoid=avoid)
        if instance is None:
            raise Unavailable(self.name, "is ready")
        return Lease(instance, size)

    async def call(
        self,
        lease: Lease,
        request_id: str,
        attempt: Callable[[Instance, bool], Awaitable[T]],
        avoid: Collection[Instance] = (),
    ) -> T:
        """Run `attempt` on the leased instance, and after `Failed` on others; the lease moves along.

        At most three instances are tried, and only one after an instance that may have seen the request;
        `attempt` is told whether another one may follow. Raises the last attempt's final error.
        """
        tried: list[Instance] = []
        sent = False
        while True:
            tried.append(lease.instance)
            follows = not sent and len(tried) < _MAX_TRIED and self.pool.pick(tried) is not None
            try:
                return await attempt(lease.instance, follows)
            except Failed as failure:
                self.report(lease.instance, failure, request_id)
                spare = None if sent or len(tried) == _MAX_TRIED else self.pool.pick(tried, avoid)
                sent = sent or failure.sent
                if spare is None:
                    raise failure.final from None
                self._metrics.retries.labels(self.name).inc()
                lease.move(spare)

    async def post(
        self, instance: Instance, headers: Headers, body: Chunks, limit: float, stage: str
    ) -> EngineAnswer:
        """One chat completion whose answer is read whole within `limit` seconds. Raises Failed."""
        try:
            async with asyncio.timeout(limit):
                with await self.client.request(instance.origin, "POST", CHAT_PATH, headers, body) as reply:
                    return EngineAnswer(reply.status, reply.headers, await reply.read(MAX_ANSWER))
        except TimeoutError:
            raise self.timed_out(instance, stage, limit) from None
        except UpstreamError as error:
            raise self.broken(instance, error) from error

    def report(self, instance: Instance, failure: Failed, request_id: str) -> None:
        """Count and log a failed call."""
        self._metrics.upstream_errors.labels(self.name, failure.kind).inc()
        logs.warning(
            "upstream_error",
            request_id=request_id,
            role=self.name,
            instance=instance.origin.url,
            kind=failure.kind,
            reason=str(failure.final),
        )

    def broken(self, instance: Instance, error: UpstreamError) -> Failed:
        """What a broken exchange means; an instance that cannot be talked to gets no more traffic."""
        where = f"{self.name} {instance.origin.url}"
        if isinstance(error, Unreachable):
            self.pool.lost(instance, f"unreachable: {error}")
            return Failed(Unavailable(self.name, "can be reached"), "unreachable", sent=False)
        if isinstance(error, Disconnected):
            self.pool.lost(instance, f"disconnected: {error}")
            final = ProxyError(502, f"{where} closed the connection", code="upstream_disconnected")
            return Failed(final, "disconnected", sent=True)
        assert isinstance(error, Garbled)
        final = ProxyError(502, f"{where} gave a malformed answer: {error}", code="bad_upstream_answer")
        return Failed(final, "garbled", sent=True)

    def timed_out(self, instance: Instance, stage: str, seconds: float) -> Failed:
        message = f"{self.name} {instance.origin.url} took longer than {seconds:g} s ({stage})"
        return Failed(ProxyError(504, message, code=f"{self.name}_timeout"), "timeout", sent=True)


def call_headers(request_id: str, authorization: bytes | None) -> Headers:
    """Headers of every child request: the same id, so that one search finds a request in all logs."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    if authorization is not None:
        headers.append((b"authorization", authorization))
    return headers


def busy(answer: EngineAnswer) -> Failed:
    """429 or 503: the instance turned the request away; the client learns when to come back."""
    if not any(name == b"retry-after" for name, _ in answer.headers):
        answer.headers.append((b"retry-after", b"1"))
    return Failed(answer, f"status_{answer.status}", sent=True)
