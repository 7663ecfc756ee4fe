"""`/v1/chat/completions`: one request's course from body to answer."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from epd_engine.core.output import RequestUpdate
from epd_engine.core.request import FinishReason, Request, RequestError
from epd_engine.loop import EngineLoop
from epd_engine.server.errors import error_body
from epd_engine.server.metrics import ServerMetrics
from epd_engine.server.prompt import PromptBuilder
from epd_engine.server.protocol import ChatCompletionRequest
from epd_engine.server.text import ChatTokenizer, TextStream


@dataclass
class Delta:
    """A piece of an answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    ec_transfer_params: Mapping[str, Any] | None = None


@dataclass
class Answer:
    """What every form of one answer needs to know."""

    request: Request
    model: str
    body: ChatCompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0

    def envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.request.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def usage(self) -> dict[str, int]:
        prompt = self.request.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }


class ChatHandler:
    """Serves chat requests of a loaded instance."""

    def __init__(
        self, loop: EngineLoop, tokenizer: ChatTokenizer, builder: PromptBuilder, metrics: ServerMetrics
    ):
        self._loop, self._tokenizer, self._builder, self._metrics = loop, tokenizer, builder, metrics

    async def serve(
        self, http: HttpRequest, body: ChatCompletionRequest, request_id: str, arrival: float
    ) -> Response:
        """The answer, or `RequestError` while nothing has been sent: a stream's headers wait for its first
        token, so that a miss in the EC store is a plain error the proxy can act on."""
        request = await self._builder.build(body, request_id)
        answer = Answer(request, body.model, body)
        deltas = self._deltas(answer, arrival)
        watcher = asyncio.create_task(_abort_when_gone(http, self._loop, request_id))
        try:
            if not body.stream:
                async with aclosing(deltas):
                    return JSONResponse(await _whole(answer, deltas))
            first = await anext(deltas)
        except BaseException:
            await deltas.aclose()
            raise
        finally:
            watcher.cancel()
        # From here on the response itself notices a client that goes away, and closes the generator.
        return StreamingResponse(
            _events(answer, first, deltas),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _deltas(self, answer: Answer, arrival: float) -> AsyncGenerator[Delta, None]:
        text = TextStream(self._tokenizer, answer.request.sampling.stop)
        last_token = arrival
        async with aclosing(self._loop.updates(answer.request)) as updates:
            async for update in updates:
                if update.error is not None:
                    raise update.error
                now = time.monotonic()
                histogram = self._metrics.inter_token
                if last_token == arrival:
                    histogram = self._metrics.time_to_first_token
                histogram.observe(now - last_token)
                last_token = now
                delta = _delta(answer, update, text)
                yield delta
                if delta.finish_reason is not None:
                    return


def _delta(answer: Answer, update: RequestUpdate, text: TextStream) -> Delta:
    answer.completion_tokens += len(update.new_token_ids)
    piece = text.push(update.new_token_ids, last=update.is_last)
    reason = update.finish_reason.value if update.finish_reason else None
    if text.stopped:
        reason = FinishReason.STOP.value
    return Delta(piece, update.new_token_ids, reason, update.ec_transfer_params)


async def _whole(answer: Answer, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    parts = [delta async for delta in deltas]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(p.text for p in parts)},
        "logprobs": None,
        "finish_reason": parts[-1].finish_reason,
    }
    document = {
        **answer.envelope("chat.completion"),
        "choices": [choice],
        "usage": answer.usage(),
    }
    if answer.body.return_token_ids:
        choice["token_ids"] = [t for p in parts for t in p.token_ids]
        document["prompt_token_ids"] = answer.request.prompt_token_ids
    if parts[-1].ec_transfer_params is not None:
        document["ec_transfer_params"] = parts[-1].ec_transfer_params
    return document


async def _events(
    answer: Answer, first: Delta, rest: AsyncGenerator[Delta, None]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events; an error after the first token is an event of its own, and the last one."""
    with_usage = answer.body.stream_options is not None and answer.body.stream_options.include_usage

    def chunk(delta: dict[str, Any], piece: Delta) -> bytes:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if answer.body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        document = {**answer.envelope("chat.completion.chunk"), "choices": [choice]}
        if with_usage:
            document["usage"] = None
        return _event(document)

    async with aclosing(rest):
        try:
            yield chunk({"role": "assistant", "content": ""}, Delta())
            piece: Delta | None = first
            while piece is not None:
                if piece.text or piece.finish_reason or answer.body.return_token_ids:
                    yield chunk({"content": piece.text} if piece.text else {}, piece)
                piece = await anext(rest, None)
        except RequestError as error:
            yield _event(error_body(error))
            return
    if with_usage:
        yield _event({**answer.envelope("chat.completion.chunk"), "choices": [], "usage": answer.usage()})
    yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


async def _abort_when_gone(http: HttpRequest, loop: EngineLoop, request_id: str) -> None:
    """Frees a request whose client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    loop.abort(request_id)
