"""Text in and out: the chat template, incremental detokenization, stop strings."""

from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import AutoTokenizer

from epd_engine.core.request import RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.models.checkpoint import Checkpoint
from epd_engine.server.protocol import ChatCompletionRequest, Message, TextPart

REPLACEMENT = "\ufffd"  # what the tokenizer writes for a character whose bytes are not complete


class ChatTokenizer:
    """The checkpoint's tokenizer, chat template and generation defaults."""

    def __init__(self, checkpoint: Checkpoint):
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        generation = checkpoint.read_json("generation_config.json") or {}
        eos = generation.get("eos_token_id", self._tokenizer.eos_token_id)
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        sampled = generation.get("do_sample", "temperature" in generation)
        self._temperature = float(generation.get("temperature", 1.0)) if sampled else 0.0
        self._top_p = float(generation.get("top_p", 1.0)) if sampled else 1.0

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the rendered chat, one placeholder per media item. Raises `RequestError`."""
        try:
            text = self._tokenizer.apply_chat_template(
                [_plain(m) for m in messages], add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, ValueError) as error:
            message = f"the chat template refuses these messages: {error}"
            raise RequestError(400, "chat_template", message, "messages") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def sampling(self, body: ChatCompletionRequest, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self._temperature if body.temperature is None else body.temperature,
            top_p=self._top_p if body.top_p is None else body.top_p,
            seed=body.seed,
            stop=tuple(body.stop or ()),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _plain(message: Message) -> dict[str, Any]:
    """What chat templates know: roles, text parts, and a part per item that names its modality."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts: list[dict[str, str]] = []
    for part in message.content:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            parts.append({"type": part.type.removeprefix("input_").split("_")[0]})
    return {"role": role, "content": parts}


class TextStream:
    """Turns a request's tokens into text as it becomes certain.

    Held back are characters whose bytes are incomplete, and text that may be the start of a stop string.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        # Tokens before `_begin` are done; `_begin.._read` give the context in which new ones are decoded.
        self._begin = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        """The text that became certain by these tokens; sets `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        self._ids += token_ids
        self._held += self._decode(last)
        return self._take(last)

    def _decode(self, last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if text.endswith(REPLACEMENT) and not last:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _take(self, last: bool) -> str:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
