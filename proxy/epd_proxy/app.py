"""The ASGI application: chat completions straight, everything else through FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response as PlainResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from epd_proxy.asgi import Message, Receive, Scope, Send, request_id
from epd_proxy.chat import ChatCompletions
from epd_proxy.config import Config
from epd_proxy.encoders import Encoders
from epd_proxy.errors import ProxyError
from epd_proxy.http1 import UpstreamError
from epd_proxy.metrics import Metrics
from epd_proxy.pds import Pds
from epd_proxy.pool import Instance
from epd_proxy.primers import Primers
from epd_proxy.prober import Prober
from epd_proxy.upstream import CHAT_PATH, MAX_ANSWER, Role, call_headers


class Proxy:
    """One proxy: its roles, its stages, and the ASGI callable that serves them."""

    def __init__(self, config: Config) -> None:
        limits = config.limits
        self.metrics = metrics = Metrics()
        self.encoder_role = Role("encoder", config.encoders, limits.connect, metrics)
        self.pd_role = Role("pd", config.pds, limits.connect, metrics)
        self._roles = (self.encoder_role, self.pd_role)
        self._limits = limits
        self._prober = Prober(self._roles, metrics)
        primers = Primers(Encoders(self.encoder_role, limits, metrics), metrics)
        self._chat = ChatCompletions(primers, Pds(self.pd_role, limits), limits, metrics)
        self._others = self._other_routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        name = request_id(dict(scope["headers"]))
        if scope["path"] == CHAT_PATH and scope["method"] == "POST":
            await self._chat.serve(name, scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "request_id": name}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        await self._others(scope, receive, send_with_id)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        await self._prober.start()
        yield
        self._prober.stop()
        for role in self._roles:
            role.client.close()

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
        ready = bool(self.pd_role.pool.ready())
        roles = {role.name: [_state(instance) for instance in role.pool] for role in self._roles}
        return _json(200 if ready else 503, {"status": "ready" if ready else "not ready", "roles": roles})

    async def _metrics_page(self) -> PlainResponse:
        return PlainResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> PlainResponse:
        """The models of a PD, as it lists them."""
        role = self.pd_role
        authorization = request.headers.get("authorization")
        headers = call_headers(request.state.request_id, authorization.encode() if authorization else None)

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
