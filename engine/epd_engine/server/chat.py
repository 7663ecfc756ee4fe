"""`/v1/chat/completions`: one request's course from body to answer."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import MISSING, fields, replace
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from epd_engine.core.output import RequestUpdate
from epd_engine.core.request import FinishReason, Request
from epd_engine.loop import EngineLoop
from epd_engine.server.answer import Answer, Delta, events, whole
from epd_engine.server.merge import merged
from epd_engine.server.metrics import ServerMetrics
from epd_engine.server.prompt import PromptBuilder
from epd_engine.server.protocol import ChatCompletionRequest
from epd_engine.server.sampling import for_choice
from epd_engine.server.text import ChatTokenizer, TextStream


class ChatHandler:
    """Serves chat requests of a loaded instance."""

    def __init__(
        self, loop: EngineLoop, tokenizer: ChatTokenizer, builder: PromptBuilder, metrics: ServerMetrics
    ):
        self._loop, self._tokenizer, self._builder, self._metrics = loop, tokenizer, builder, metrics

    async def prepare(self, body: ChatCompletionRequest, request_id: str) -> Request:
        """What the engine is to run. Raises `RequestError`."""
        return await self._builder.build(body, request_id)

    async def answer(self, body: ChatCompletionRequest, request: Request, arrival: float) -> Response:
        """The answer, or `RequestError` while nothing has been sent: a stream's headers wait for its first
        token, so that a miss in the EC store is a plain error the proxy can act on."""
        choices = _choices(request, body.n)
        answer = Answer(choices[0], request.request_id, body, self._tokenizer.tokens)
        deltas = merged([self._deltas(answer, i, one, arrival) for i, one in enumerate(choices)])
        try:
            if not body.stream:
                return JSONResponse(await whole(answer, deltas))
            first = await anext(deltas)
        except BaseException:
            await deltas.aclose()
            raise
        # From here on the response itself notices a client that goes away, and closes the generator.
        return StreamingResponse(
            events(answer, first, deltas, self._metrics.stream_errors),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _deltas(
        self, answer: Answer, index: int, request: Request, arrival: float
    ) -> AsyncGenerator[Delta, None]:
        text = TextStream(self._tokenizer, request.sampling)
        last_token = arrival
        async with aclosing(self._loop.updates(request)) as updates:
            async for update in updates:
                if update.error is not None:
                    raise update.error
                now = time.monotonic()
                histogram = self._metrics.inter_token
                if last_token == arrival:
                    histogram = self._metrics.time_to_first_token
                histogram.observe(now - last_token)
                last_token = now
                answer.completion_tokens += len(update.new_token_ids)
                delta = self._delta(index, request, update, text)
                yield delta
                if delta.finish_reason is not None:
                    return

    def _delta(self, index: int, request: Request, update: RequestUpdate, text: TextStream) -> Delta:
        token_ids, reason = update.new_token_ids, update.finish_reason
        readable: tuple[int, ...] = token_ids
        stop_reason: int | str | None = None
        if reason is FinishReason.STOP and token_ids:
            # The token that ends an answer is no text of it; the model's own end is no news either.
            if not request.sampling.include_stop:
                readable = token_ids[:-1]
            if token_ids[-1] not in self._tokenizer.eos_token_ids:
                stop_reason = token_ids[-1]
        piece = text.push(readable, last=update.is_last)
        said = None if reason is None else reason.value
        if text.stopped_by is not None:
            said, stop_reason = FinishReason.STOP.value, text.stopped_by
        return Delta(
            index,
            piece,
            token_ids,
            update.logprobs,
            said,
            stop_reason,
            update.ec_transfer_params,
            update.kv_transfer_params,
        )


def _choices(request: Request, n: int) -> list[Request]:
    """A request of its own for each choice: they share the prompt's tokens and media, for which an encoder
    published once, and nothing else."""
    if n == 1 or not request.prompt_token_ids:
        return [request]
    return [
        replace(
            request,
            **_fresh_state(request),
            request_id=f"{request.request_id}-{index}",
            media=[replace(item) for item in request.media],
            sampling=for_choice(request.sampling, index),
        )
        for index in range(n)
    ]


def _fresh_state(request: Request) -> dict[str, Any]:
    """The fields that a request collects as it runs, empty; what the store has heard, it heard for all."""
    fresh = {f.name: f.default_factory() for f in fields(request) if f.default_factory is not MISSING}
    return {**fresh, "acknowledged": request.acknowledged}
