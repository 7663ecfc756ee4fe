"""The ASGI application: chat completions straight, everything else through FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response as PlainResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from epd_proxy import apiserver
from epd_proxy.asgi import Message, Receive, Response, Scope, Send, request_id
from epd_proxy.chat import ChatCompletions
from epd_proxy.config import DECODE, ENCODER, PD, PREFILL, Config, Limits, Services
from epd_proxy.discovery import Discovery
from epd_proxy.door import Door
from epd_proxy.encoders import Encoders
from epd_proxy.errors import ProxyError, Unauthorized
from epd_proxy.handover import Handover
from epd_proxy.http1 import UpstreamError
from epd_proxy.language import Language, Pds
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Instance
from epd_proxy.primers import Primers
from epd_proxy.prober import Prober
from epd_proxy.upstream import CHAT_PATH, MAX_ANSWER, Role, call_headers

_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For probes and Prometheus, which have no API key. Everything else needs one where keys are set."""


class Proxy:
    """One proxy: its roles, its stages, and the ASGI callable that serves them.

    Raises OSError or ValueError for a file of keys that cannot be used.
    """

    def __init__(self, config: Config) -> None:
        limits = config.limits
        self.metrics = metrics = Metrics()
        self.roles = {
            name: Role(name, config.instances.get(name, ()), limits.connect, metrics) for name in config.roles
        }
        self.language = _language(self.roles, limits, metrics)
        self._limits = limits
        self._door = Door(config.api_keys, metrics)
        self._prober = Prober(tuple(self.roles.values()))
        self._discovery = self._discover(config.services) if config.services else None
        primers = Primers(Encoders(self.roles[ENCODER], limits, metrics), metrics)
        self._chat = ChatCompletions(self._door, primers, self.language, limits, metrics)
        self._others = self._other_routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        name = request_id(dict(scope["headers"]))
        if scope["path"] == CHAT_PATH and scope["method"] == "POST":
            await self._chat.serve(name, scope, receive, send)
            return
        if scope["path"] not in _OPEN_PATHS:
            try:
                self._door.admit(dict(scope["headers"]))
            except Unauthorized as error:
                await Response(send, name).fail(error)
                return
        scope["state"] = {**scope.get("state", {}), "request_id": name}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        await self._others(scope, receive, send_with_id)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._door.start()
        await self._prober.start()
        if self._discovery is not None:
            self._discovery.start()
        yield
        if self._discovery is not None:
            await self._discovery.stop()
        self._prober.stop()
        self._door.stop()
        for role in self.roles.values():
            role.client.close()

    def _discover(self, services: Services) -> Discovery:
        pools = {service: self.roles[role].pool for role, service in services.names.items()}
        connect = apiserver.connector(services.namespace, tuple(pools))
        return Discovery(pools, connect, self.metrics.discovery())

    def _other_routes(self) -> FastAPI:
        app = FastAPI(lifespan=self._lifespan, openapi_url=None, docs_url=None, redoc_url=None)
        app.add_api_route("/health", self._health)
        app.add_api_route("/ready", self._ready)
        app.add_api_route("/metrics", self._metrics_page)
        app.add_api_route("/v1/models", self._models)
        app.add_exception_handler(HTTPException, _no_such_route)
        app.add_exception_handler(ProxyError, _as_body)
        return app

    async def _health(self) -> dict[str, str]:
        return {"status": "ok"}

    async def _ready(self) -> PlainResponse:
        ready = all(role.pool.ready() for role in self.language.roles)
        roles = {name: [_state(instance) for instance in role.pool] for name, role in self.roles.items()}
        return _json(200 if ready else 503, {"status": "ready" if ready else "not ready", "roles": roles})

    async def _metrics_page(self) -> PlainResponse:
        return PlainResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> PlainResponse:
        """The models of an instance that answers, as it lists them."""
        role = self.language.roles[-1]
        authorization = self._door.passed_on(dict(request.scope["headers"]))
        headers = call_headers(request.state.request_id, authorization)

        async def attempt(instance: Instance, _: bool) -> PlainResponse:
            try:
                async with asyncio.timeout(self._limits.idle):
                    with await role.client.request(instance.origin, "GET", "/v1/models", headers) as reply:
                        body = await reply.read(MAX_ANSWER)
                        return PlainResponse(body, reply.status, media_type="application/json")
            except TimeoutError:
                raise role.timed_out(instance, "models", self._limits.idle) from None
            except UpstreamError as error:
                raise role.broken(instance, error) from error

        lease = role.lease()
        try:
            return await role.call(lease, request.state.request_id, attempt)
        finally:
            lease.release()


def _language(roles: Mapping[str, Role], limits: Limits, metrics: Metrics) -> Language:
    if PD in roles:
        return Pds(roles[PD], limits)
    return Handover(roles[PREFILL], roles[DECODE], limits, metrics)


def _state(instance: Instance) -> dict[str, Any]:
    return {
        "url": instance.origin.url,
        "ready": instance.ready,
        "reason": instance.reason,
        "outstanding": instance.outstanding,
    }


def _json(status: int, value: object) -> PlainResponse:
    return PlainResponse(orjson.dumps(value), status, media_type="application/json")


async def _as_body(_: Request, error: Exception) -> PlainResponse:
    assert isinstance(error, ProxyError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return PlainResponse(error.body, error.status, headers)


async def _no_such_route(request: Request, error: Exception) -> PlainResponse:
    assert isinstance(error, HTTPException)
    # Chat completions are served before FastAPI sees them, so what comes here has another method.
    status = 405 if request.url.path == CHAT_PATH else error.status_code
    message = f"{request.method} {request.url.path}: " + (
        "Not Found" if status == 404 else "Method Not Allowed"
    )
    code = "not_found" if status == 404 else "method_not_allowed"
    return await _as_body(request, ProxyError(status, message, code=code))
