"""Routes, and what surrounds every request: its id, its limits, its log line."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from epd_engine.config import EngineConfig
from epd_engine.core.request import RequestError
from epd_engine.loop import EngineLoop
from epd_engine.server.chat import ChatHandler
from epd_engine.server.drain import Drain
from epd_engine.server.errors import as_request_error, error_response, invalid_request
from epd_engine.server.metrics import ServerMetrics
from epd_engine.server.prompt import PromptBuilder
from epd_engine.server.protocol import ChatCompletionRequest
from epd_engine.server.text import ChatTokenizer

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 256 << 20
PULL_POLL_SECONDS = 0.05
STALLED_SECONDS = 300.0  # a step that takes longer than this is taken for a hang
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Service:
    """One instance: the loop, and once its weights are in, the chat handler."""

    def __init__(self, config: EngineConfig, loop: EngineLoop, drain: Drain):
        self._config, self.loop, self._drain = config, loop, drain
        self.metrics = ServerMetrics()
        self._chat: ChatHandler | None = None
        self._builder: PromptBuilder | None = None
        self._num_preparing = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._config.served_model_names or (self._config.model,)

    @property
    def is_ready(self) -> bool:
        return self._chat is not None and self.loop.is_ready

    @property
    def is_healthy(self) -> bool:
        return self.loop.is_alive and (not self.loop.is_ready or self.loop.heartbeat_age < STALLED_SECONDS)

    async def complete(self, http: Request, request_id: str, arrival: float) -> Response:
        """Raises `RequestError`."""
        if self._chat is None or not self.is_ready:
            raise RequestError(503, "not_ready", "the model is being loaded")
        with self._preparing():
            body = self._parse(await _read_body(http))
            # Two clients may send the same id; inside, an id is one request's own.
            inner_id = f"{request_id}-{secrets.token_hex(4)}"
            request = await _unless_gone(http, self._chat.prepare(body, inner_id))
        return await _unless_gone(http, self._chat.answer(body, request, arrival))

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Meanwhile a request counts that the engine does not know yet. Raises `RequestError` if all places
        are taken."""
        limit = self._config.max_waiting + self._config.max_num_seqs
        if self._num_preparing + self.loop.num_requests >= limit:
            raise RequestError(429, "queue_full", f"{limit} requests are in flight already")
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    def _parse(self, raw: bytearray) -> ChatCompletionRequest:
        try:
            body = ChatCompletionRequest.model_validate_json(raw)
        except ValidationError as error:
            raise invalid_request(error) from error
        if body.model not in self.model_names:
            names = ", ".join(self.model_names)
            raise RequestError(
                404, "model_not_found", f"the model {body.model!r} is not served; served: {names}", "model"
            )
        return body

    async def run(self, on_failure: Callable[[], None]) -> None:
        """Starts loading and returns once requests can be served."""
        self.loop.start(on_failure)
        engine = await self.loop.wait_ready()
        try:
            tokenizer = await asyncio.to_thread(ChatTokenizer, engine.family.checkpoint)
        except Exception as error:  # noqa: BLE001 - reported by who serves, as the engine's own
            self.loop.fail(error)
            return
        self._builder = PromptBuilder(engine, tokenizer, self.metrics, self.loop.arriving)
        self._chat = ChatHandler(self.loop, tokenizer, self._builder, self.metrics)
        self.metrics.attach(engine)
        log.info("ready", extra=engine.describe())

    async def stop(self) -> None:
        """Once all answers are given. What they promised stays until it is pulled, while there is time."""
        while self.loop.owes_kv and not self._drain.is_over:  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(PULL_POLL_SECONDS)
        await self.loop.stop()
        if self._builder is not None:
            self._builder.shutdown()


def create_app(service: Service, on_failure: Callable[[], None]) -> FastAPI:
    """The HTTP application; `on_failure` is called when the engine's thread ends by an error."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.run(on_failure))
        yield
        starting.cancel()
        await service.stop()

    app = FastAPI(title="epd-engine", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await _observed(service, http)

    @app.get("/v1/models")
    async def models() -> Response:
        created = int(time.time())
        data = [
            {"id": n, "object": "model", "created": created, "owned_by": "epd"} for n in service.model_names
        ]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/health")
    async def health() -> Response:
        healthy = service.is_healthy
        return JSONResponse({"status": "ok" if healthy else "stalled"}, 200 if healthy else 503)

    @app.get("/ready")
    async def ready() -> Response:
        is_ready = service.is_ready
        return JSONResponse({"status": "ready" if is_ready else "loading"}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return error_response(RequestError(error.status_code, "invalid_request", message))

    return app


async def _observed(service: Service, http: Request) -> Response:
    """Runs one chat request and gives it its id, its error body, its metric and its log line."""
    arrival = time.monotonic()
    given = http.headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    code = "ok"
    try:
        response = await service.complete(http, request_id, arrival)
    except ClientDisconnect:
        response, code = Response(status_code=499), "client_gone"
    except Exception as error:  # noqa: BLE001 - the caller gets an answer whatever happens
        told = as_request_error(error, request_id)
        response, code = error_response(told), told.code
    response.headers["x-request-id"] = request_id
    service.metrics.requests.labels(str(response.status_code), code).inc()
    log.info(
        "chat request",
        extra={
            "request_id": request_id,
            "status": response.status_code,
            "code": code,
            "seconds": round(time.monotonic() - arrival, 4),
        },
    )
    return response


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. It is cancelled, which frees all that it has asked for, if the client closes the
    connection meanwhile. Raises `ClientDisconnect`."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read_body(http: Request) -> bytearray:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(413, "body_too_large", f"the body exceeds {MAX_BODY_BYTES} bytes")
    return body
