"""A role as the proxy calls it: its instances, its client, and when another instance is tried."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from epd_proxy import logs
from epd_proxy.config import Origin
from epd_proxy.errors import EngineAnswer, Headers, ProxyError, Unavailable
from epd_proxy.http1 import Client, Disconnected, Garbled, Unreachable, UpstreamError
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

    async def call(self, lease: Lease, request_id: str, attempt: Callable[[Instance], Awaitable[T]]) -> T:
        """Run `attempt` on the leased instance, and after `Failed` on others; the lease moves along.

        At most three instances are tried, and only one after an instance that may have seen the request.
        Raises the last attempt's final error.
        """
        tried: list[Instance] = []
        sent = 0
        while True:
            tried.append(lease.instance)
            try:
                return await attempt(lease.instance)
            except Failed as failure:
                self.report(lease.instance, failure.kind, str(failure.final), request_id)
                sent += failure.sent
                spare = self.pool.pick(tried) if len(tried) < _MAX_TRIED and sent < 2 else None
                if spare is None:
                    raise failure.final from None
                self._metrics.retries.labels(self.name).inc()
                lease.move(spare)

    def spare(self, instance: Instance) -> bool:
        """Whether another instance could take over."""
        return self.pool.pick((instance,)) is not None

    def report(self, instance: Instance, kind: str, reason: str, request_id: str) -> None:
        """Count and log a failed call."""
        self._metrics.upstream_errors.labels(self.name, kind).inc()
        logs.warning(
            "upstream_error",
            request_id=request_id,
            role=self.name,
            instance=instance.origin.url,
            kind=kind,
            reason=reason,
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
