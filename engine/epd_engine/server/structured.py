"""Structured answers: what a request asks for, compiled once and kept.

llguidance makes the grammars (MIT, a wheel without dependencies). Compiling runs in the pool that prepares
requests, outside Python's lock.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from epd_engine.core.request import RequestError
from epd_engine.server.protocol import SamplingFields, StructuredOutputs
from epd_engine.worker.logits.grammar import LLGrammar, first_line

MAX_SCHEMA_BYTES = 64 << 10
MAX_KEPT = 64
MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
# A model that likes white space could else go on with it for ever.
WHITESPACE = r"[ \n\r\t]{1,40}"


class GrammarCompiler:
    """Grammars of one tokenizer, the last used ones kept. May be called from several threads."""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]):
        """`make_tokenizer` takes up to a second with a large vocabulary; it is called when first needed."""
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, body: SamplingFields) -> LLGrammar | None:
        """What `body` asks for, or None. Raises `RequestError` for a form that cannot be followed."""
        asked = body.structure
        if asked is None:
            return None
        param, form = asked
        try:
            source = _source(form)
            with self._lock:
                tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
                if source in self._kept:
                    self._kept.move_to_end(source)
                    return self._kept[source]
            grammar = _compiled(tokenizer, source)
        except ValueError as error:
            raise RequestError(400, "invalid_grammar", f"{param}: {error}", param) from error
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar


def _compiled(tokenizer: LLTokenizer, source: str) -> LLGrammar:
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(first_line(matcher.get_error()))
    return LLGrammar(matcher, tokenizer.vocab_size)


def _source(form: StructuredOutputs) -> str:
    """llguidance's own writing of a form. Raises `ValueError`."""
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(_bounded(form.regex))
    if form.choice is not None:
        words = " | ".join(_bounded(json.dumps(word, ensure_ascii=False)) for word in form.choice)
        return LLMatcher.grammar_from_lark(_bounded(f"start: {words}"))
    schema = {"type": "object"} if form.json_ is None else form.json_
    text = _bounded(schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False))
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": WHITESPACE, "coerce_one_of": True, "lenient": False}
    )


def _bounded(text: str) -> str:
    size = len(text.encode())
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"{size} bytes are given, at most {MAX_SCHEMA_BYTES} are taken")
    return text
