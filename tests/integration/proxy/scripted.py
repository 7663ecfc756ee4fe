"""Scripted engines: real HTTP servers that speak the wire contract and misbehave on demand."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[["Call"], Awaitable[web.StreamResponse]]

MEDIA = ("image_url", "audio_url", "input_audio", "video_url")


@dataclass
class Call:
    """One chat completion that an engine got."""

    request: web.Request
    raw: bytes
    body: dict[str, Any] = field(init=False)
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.body = json.loads(self.raw)

    @property
    def parts(self) -> list[dict[str, Any]]:
        return [p for m in self.body["messages"] if isinstance(m["content"], list) for p in m["content"]]

    @property
    def sources(self) -> list[str]:
        """The URL or data of each media part."""
        return [p[p["type"]].get("url") or p[p["type"]]["data"] for p in self.parts if p["type"] in MEDIA]


class Engine:
    """One scripted engine; `script` holds handlers for the next calls, then `default` answers."""

    def __init__(self, default: Handler, host: str = "127.0.0.1") -> None:
        self.host = host
        self.default = default
        self.script: list[Handler] = []
        self.calls: list[Call] = []
        self.cut_calls: list[Call] = []
        self.arrived = asyncio.Condition()
        self.ready_status = 200
        self.has_ready = True
        self.probes: list[str] = []
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/ready", self._probe)
        app.router.add_get("/health", self._probe)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def wait_calls(self, count: int) -> None:
        """Until `count` calls have arrived in all."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.calls) >= count)

    async def wait_cut(self, count: int = 1) -> None:
        """Until `count` calls were cut by the proxy before their end."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.cut_calls) >= count)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.read())
        async with self.arrived:
            self.calls.append(call)
            self.arrived.notify_all()
        handler = self.script.pop(0) if self.script else self.default
        try:
            return await handler(call)
        except (asyncio.CancelledError, ConnectionResetError):
            async with self.arrived:
                self.cut_calls.append(call)
                self.arrived.notify_all()
            raise

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "digits", "object": "model"}]})

    async def _probe(self, request: web.Request) -> web.Response:
        self.probes.append(request.path)
        if request.path == "/ready" and not self.has_ready:
            raise web.HTTPNotFound
        return web.json_response({}, status=self.ready_status)


def mm_hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def metadata(source: str) -> dict[str, Any]:
    return {"image_grid_thw": [1, 2, len(source)]}


async def encode(call: Call) -> web.Response:
    """What an encoder answers: a key and metadata for every item."""
    return primed(call, metadata)


def primed(call: Call, describe: Callable[[str], dict[str, Any]]) -> web.Response:
    params: dict[str, Any] = {}
    for index, source in enumerate(call.sources):
        entry = params.setdefault(mm_hash(source), {"item_indices": [], "metadata": describe(source)})
        entry["item_indices"].append(index)
    choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    return web.json_response({"object": "chat.completion", "choices": [choice], "ec_transfer_params": params})


def event(**delta: Any) -> bytes:
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ROLE = event(role="assistant", content="")
STREAM = [ROLE, event(content="se"), event(content="vén"), DONE]
ANSWER = b'{"object": "chat.completion",  "choices": [{"message": {"content": "seven"}}]}'


async def decode(call: Call) -> web.StreamResponse:
    """What a PD answers."""
    if call.body.get("stream"):
        return await stream(call, STREAM)
    return web.Response(body=ANSWER, content_type="application/json")


async def prefill(call: Call) -> web.Response:
    """What a prefill instance answers: the first token, and where the KV lies."""
    return await prefilled({"remote_request_id": call.request.headers["x-request-id"]})(call)


def prefilled(params: object, reason: str = "length") -> Handler:
    """A prefill instance's answer with these `kv_transfer_params`."""

    async def handler(call: Call) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "se"}, "finish_reason": reason}
        document = {"object": "chat.completion", "choices": [choice], "kv_transfer_params": params}
        return web.json_response(document)

    return handler


async def start_stream(call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(call.request)
    return response


async def stream(call: Call, pieces: list[bytes]) -> web.StreamResponse:
    response = await start_stream(call)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def streams(*pieces: bytes) -> Handler:
    async def handler(call: Call) -> web.StreamResponse:
        return await stream(call, list(pieces))

    return handler


def error_body(message: str, code: object = None, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def fails(status: int, code: object = None, headers: dict[str, str] | None = None) -> Handler:
    async def handler(call: Call) -> web.Response:
        return web.json_response(error_body(f"scripted {status}", code), status=status, headers=headers)

    return handler


def answers(text: bytes) -> Handler:
    async def handler(call: Call) -> web.Response:
        return web.Response(body=text, content_type="application/json")

    return handler


def breaks_after(*pieces: bytes) -> Handler:
    """The connection is reset after these pieces of a stream; with none, before any byte."""

    async def handler(call: Call) -> web.StreamResponse:
        response = await start_stream(call) if pieces else web.StreamResponse()
        for piece in pieces:
            await response.write(piece)
        assert call.request.transport is not None
        if pieces:
            call.request.transport.close()  # what was written arrives; the chunked end never does
        else:
            call.request.transport.abort()
        return response

    return handler


async def hangs(call: Call) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def waits(gate: asyncio.Event, then: Handler) -> Handler:
    async def handler(call: Call) -> web.StreamResponse:
        await gate.wait()
        return await then(call)

    return handler
