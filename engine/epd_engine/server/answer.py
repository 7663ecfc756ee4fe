"""The forms of one answer: a whole completion, or the events of a stream."""

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter

from epd_engine.core.request import Request
from epd_engine.core.sampling import TokenLogprobs
from epd_engine.server.errors import as_request_error, error_body
from epd_engine.server.logprobs import logprobs_content
from epd_engine.server.protocol import ChatCompletionRequest
from epd_engine.server.token_text import TokenText


@dataclass
class Delta:
    """A piece of one choice."""

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ec_transfer_params: Mapping[str, Any] | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass
class Answer:
    """What every form of one answer needs to know; `request` is that of the first choice."""

    request: Request
    answer_id: str
    body: ChatCompletionRequest
    tokens: TokenText
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0

    def envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.answer_id}",
            "object": kind,
            "created": self.created,
            "model": self.body.model,
        }

    def usage(self) -> dict[str, Any]:
        """The prompt counts once, however many choices there are; its cached ones are the first choice's."""
        prompt = self.request.num_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.request.num_cached_tokens or 0},
        }

    def logprobs(self, pieces: Sequence[Delta]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = [e for p in pieces for e in logprobs_content(self.tokens, p.token_ids, p.logprobs)]
        return {"content": content, "refusal": None}


async def whole(answer: Answer, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
    """The completion, once every choice has ended."""
    pieces: list[list[Delta]] = [[] for _ in range(answer.body.n)]
    async for delta in deltas:
        pieces[delta.index].append(delta)
    # An instance that only encodes answers once, whatever was asked for.
    choices = [_choice(answer, parts) for parts in pieces if parts]
    document = {**answer.envelope("chat.completion"), "choices": choices, "usage": answer.usage()}
    if answer.body.return_token_ids:
        document["prompt_token_ids"] = answer.request.prompt_token_ids
    if (params := pieces[0][-1].ec_transfer_params) is not None:
        document["ec_transfer_params"] = params
    if (params := pieces[0][-1].kv_transfer_params) is not None:
        document["kv_transfer_params"] = params
    return document


def _choice(answer: Answer, parts: Sequence[Delta]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": parts[0].index,
        "message": {"role": "assistant", "content": "".join(p.text for p in parts)},
        "logprobs": answer.logprobs(parts),
        "finish_reason": parts[-1].finish_reason,
        "stop_reason": parts[-1].stop_reason,
    }
    if answer.body.return_token_ids:
        choice["token_ids"] = [t for p in parts for t in p.token_ids]
    return choice


async def events(
    answer: Answer, first: Delta, rest: AsyncGenerator[Delta, None], errors: Counter
) -> AsyncGenerator[bytes, None]:
    """Server-sent events; an error after the first token is an event of its own, and the last one;
    `errors` counts it by its code."""
    body = answer.body
    always = body.return_token_ids or body.logprobs  # what a token carries beside its text
    async with aclosing(rest):
        try:
            for index in range(body.n):
                yield _chunk(answer, {"role": "assistant", "content": ""}, Delta(index))
            piece: Delta | None = first
            while piece is not None:
                if piece.text or piece.finish_reason or always:
                    yield _chunk(answer, {"content": piece.text} if piece.text else {}, piece)
                piece = await anext(rest, None)
        except Exception as error:  # noqa: BLE001 - the caller is told whatever happens
            told = as_request_error(error, answer.answer_id)
            errors.labels(told.code).inc()
            yield _event(error_body(told))
            return
    if _with_usage(answer):
        yield _event({**answer.envelope("chat.completion.chunk"), "choices": [], "usage": answer.usage()})
    yield b"data: [DONE]\n\n"


def _chunk(answer: Answer, delta: dict[str, Any], piece: Delta) -> bytes:
    choice: dict[str, Any] = {
        "index": piece.index,
        "delta": delta,
        "logprobs": answer.logprobs([piece]) if piece.token_ids else None,
        "finish_reason": piece.finish_reason,
    }
    if piece.finish_reason is not None:
        choice["stop_reason"] = piece.stop_reason
    if answer.body.return_token_ids:
        choice["token_ids"] = list(piece.token_ids)
    document = {**answer.envelope("chat.completion.chunk"), "choices": [choice]}
    options = answer.body.stream_options
    if options is not None and options.continuous_usage_stats:
        document["usage"] = answer.usage()
    elif _with_usage(answer):
        document["usage"] = None
    return _event(document)


def _with_usage(answer: Answer) -> bool:
    return answer.body.stream_options is not None and answer.body.stream_options.include_usage


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()
