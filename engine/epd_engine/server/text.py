"""Text in and out: the chat template, incremental detokenization, stop strings."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from llguidance import LLTokenizer
from transformers import AutoTokenizer

from epd_engine.core.request import RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.models.checkpoint import Checkpoint, CheckpointError
from epd_engine.server.protocol import ChatCompletionRequest, Message, TextPart
from epd_engine.server.sampling import SamplingDefaults, sampling_params
from epd_engine.server.structured import GrammarCompiler
from epd_engine.server.token_text import TokenText

REPLACEMENT = "\ufffd"  # what the tokenizer writes for a character whose bytes are not complete
# Tokens held back at most while no character becomes complete: beyond these the bytes are no text.
MAX_INCOMPLETE = 16


class ChatTokenizer:
    """The checkpoint's tokenizer, chat template and generation defaults."""

    def __init__(self, checkpoint: Checkpoint):
        """Raises `CheckpointError` for a checkpoint that cannot render a chat."""
        self._tokenizer = checkpoint.read_with(AutoTokenizer)
        # Where processors kept it before templates had files of their own; tokenizers do not look there.
        older = checkpoint.read_json("chat_template.json")
        if older is not None and not (checkpoint.folder / "chat_template.jinja").exists():
            self._tokenizer.chat_template = older["chat_template"]
        if not self._tokenizer.chat_template:
            raise CheckpointError(f"{checkpoint.folder} has no chat template (chat_template.jinja)")
        if not self._tokenizer("a")["input_ids"]:
            raise CheckpointError(
                f"{checkpoint.folder} has no tokenizer (tokenizer.json): it makes no tokens"
            )
        generation = checkpoint.read_json("generation_config.json") or {}
        eos = generation.get("eos_token_id", self._tokenizer.eos_token_id)
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.tokens = TokenText(self._tokenizer)
        self._defaults = SamplingDefaults.of(generation)
        config: Mapping[str, Any] = checkpoint.config or {}
        sizes = (config.get("text_config", {}).get("vocab_size"), config.get("vocab_size"))
        self._vocab_size = int(next((size for size in sizes if size), len(self._tokenizer)))
        self._reserved = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        self._grammars = GrammarCompiler(self._grammar_tokenizer)

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the rendered chat, one placeholder per media item; `options` are variables of the
        template. Raises `RequestError`."""
        if reserved := sorted(self._reserved & set(options or {})):
            message = f"chat_template_kwargs: {reserved[0]} is not a variable of the template"
            raise RequestError(400, "invalid_value", message, "chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                [_plain(m) for m in messages], add_generation_prompt=True, tokenize=False, **(options or {})
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            message = f"the chat template refuses these messages: {error}"
            raise RequestError(400, "chat_template", message, "messages") from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def sampling(self, body: ChatCompletionRequest, max_tokens: int) -> SamplingParams:
        """Compiles what a structured answer needs: not for the event loop. Raises `RequestError`."""
        grammar = self._grammars.compile(body)
        return sampling_params(body, self._defaults, max_tokens, self._vocab_size, grammar)

    def ends(self, body: ChatCompletionRequest) -> frozenset[int]:
        """Tokens that end an answer."""
        own = frozenset[int]() if body.ignore_eos else self.eos_token_ids
        return own | frozenset(body.stop_token_ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _grammar_tokenizer(self) -> LLTokenizer:
        """Raises `ValueError` for a tokenizer whose bytes llguidance cannot read."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not self.eos_token_ids:
            raise ValueError(
                "structured answers need a fast tokenizer and an end token, which this model lacks"
            )
        size = max(self._vocab_size, len(self._tokenizer))
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self.eos_token_ids))


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
    Stop strings count once more than `min_tokens` tokens are there, in the text that follows.
    """

    def __init__(self, tokenizer: ChatTokenizer, sampling: SamplingParams):
        self._tokenizer, self._wanted = tokenizer, sampling
        self._ids: list[int] = []
        # Tokens before `_begin` are done; `_begin.._read` give the context in which new ones are decoded.
        self._begin = self._read = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_ids: Sequence[int], *, last: bool) -> str:
        """The text that became certain by these tokens; sets `stopped_by` when a stop string is complete."""
        if self.stopped_by is not None:
            return ""
        self._ids += token_ids
        self._held += self._decode(last)
        return self._take(last)

    def _decode(self, last: bool) -> str:
        skip = self._wanted.skip_special_tokens
        before = self._tokenizer.decode(self._ids[self._begin : self._read], skip_special_tokens=skip)
        text = self._tokenizer.decode(self._ids[self._begin :], skip_special_tokens=skip)
        if text.endswith(REPLACEMENT) and not last and len(self._ids) - self._read < MAX_INCOMPLETE:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _take(self, last: bool) -> str:
        stops = self._wanted.stop if len(self._ids) > self._wanted.min_tokens else ()
        # The one that is complete first, so that it does not matter where the edges of tokens lie.
        found = [(at + len(stop), at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, begin, self.stopped_by = min(found)
            cut = end if self._wanted.include_stop else begin
        else:
            keep = 0 if last else max((_overlap(self._held, stop) for stop in stops), default=0)
            cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
