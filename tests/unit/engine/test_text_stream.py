from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_engine.core.request import RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.models.checkpoint import Checkpoint
from epd_engine.server.protocol import Message
from epd_engine.server.text import ChatTokenizer, TextStream
from tests.support.digits import MODEL


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return shared()


def ids_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer._tokenizer(text, add_special_tokens=False)["input_ids"]


PLAIN = SamplingParams(max_tokens=99)


def stream(tokenizer: ChatTokenizer, text: str, *stop: str, **wanted: object) -> list[str]:
    """The pieces that come out when `text` goes in token by token."""
    ids = ids_of(tokenizer, text)
    out = TextStream(tokenizer, replace(PLAIN, stop=stop, **wanted))  # type: ignore[arg-type]
    pieces = []
    for at, token in enumerate(ids):
        pieces.append(out.push([token], last=at == len(ids) - 1))
        if out.stopped_by:
            break
    return pieces


@pytest.mark.parametrize(
    "text", ["seven three", "naïve café", "数字は七です", "🙂👩‍👩‍👧 ok", " leading", "a\nb"]
)
def test_pieces_join_to_the_text_and_never_split_a_character(tokenizer: ChatTokenizer, text: str) -> None:
    pieces = stream(tokenizer, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_end_inside_a_character_is_shown_as_such(tokenizer: ChatTokenizer) -> None:
    out = TextStream(tokenizer, PLAIN)
    first_bytes = ids_of(tokenizer, "数")[:-1]
    assert out.push(first_bytes, last=False) == ""
    assert "\ufffd" in out.push([], last=True)


@pytest.mark.parametrize("stop", ["seven", "ven thr", "three", "e", " t"])
def test_text_ends_before_a_stop_string_even_across_tokens(tokenizer: ChatTokenizer, stop: str) -> None:
    text = "six seven three"
    assert "".join(stream(tokenizer, text, stop)) == text[: text.index(stop)]


def test_text_that_only_began_like_a_stop_string_comes_out_in_the_end(tokenizer: ChatTokenizer) -> None:
    assert "".join(stream(tokenizer, "six seven thre", "three")) == "six seven thre"


def test_the_earliest_of_several_stops_wins(tokenizer: ChatTokenizer) -> None:
    assert "".join(stream(tokenizer, "one two three", "three", "two")) == "one "


def test_special_tokens_are_not_text(tokenizer: ChatTokenizer) -> None:
    out = TextStream(tokenizer, PLAIN)
    eos = next(iter(tokenizer.eos_token_ids))
    assert out.push([*ids_of(tokenizer, "seven"), eos], last=True) == "seven"


def test_a_developer_message_is_a_system_message_to_the_template(tokenizer: ChatTokenizer) -> None:
    system = tokenizer.encode_chat([Message(role="system", content="x")])
    assert tokenizer.encode_chat([Message(role="developer", content="x")]) == system


def test_special_tokens_are_text_when_asked_for(tokenizer: ChatTokenizer) -> None:
    eos = next(iter(tokenizer.eos_token_ids))
    out = TextStream(tokenizer, replace(PLAIN, skip_special_tokens=False))
    written = tokenizer.decode([eos], skip_special_tokens=False)
    assert written
    assert out.push([*ids_of(tokenizer, "seven"), eos], last=True) == "seven" + written


def test_a_stop_string_may_be_kept(tokenizer: ChatTokenizer) -> None:
    assert "".join(stream(tokenizer, "six seven three", "ven t", include_stop=True)) == "six seven t"


def test_a_stop_string_counts_only_after_the_least_number_of_tokens(tokenizer: ChatTokenizer) -> None:
    text = "seven seven seven"
    assert len(ids_of(tokenizer, text)) == 3
    assert "".join(stream(tokenizer, text, "seven", min_tokens=1)) == "seven "
    assert "".join(stream(tokenizer, text, "seven", min_tokens=5)) == text


class Characters:
    """A tokenizer whose token ids are characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def expected(text: str, stops: list[str]) -> str:
    """By definition: read on, character by character, until the text ends with a stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(
    st.text("ab\u00e9", max_size=24),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), min_size=24, max_size=24),
)
def test_it_does_not_matter_how_a_text_is_cut_into_tokens(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    out = TextStream(Characters(), replace(PLAIN, stop=tuple(stops)))  # type: ignore[arg-type]
    pieces, rest = [], [ord(char) for char in text]
    for length in lengths:
        pieces.append(out.push(rest[:length], last=len(rest) <= length))
        rest = rest[length:]
        if not rest or out.stopped_by:
            break
    assert "".join(pieces) == expected(text, stops)


@cache
def shared() -> ChatTokenizer:
    return ChatTokenizer(Checkpoint(MODEL))


@given(st.text(max_size=20))
def test_any_text_comes_out_as_it_went_in(text: str) -> None:
    tokenizer = shared()
    assert "".join(stream(tokenizer, text)) == tokenizer.decode(ids_of(tokenizer, text))


def test_bytes_that_never_become_a_character_are_not_held_for_ever(tokenizer: ChatTokenizer) -> None:
    broken = ids_of(tokenizer, "\U0001f642")[0]
    out = TextStream(tokenizer, PLAIN)
    pieces = [out.push([broken], last=False) for _ in range(64)]
    assert sum(map(len, pieces)) >= 48


def test_tokens_have_their_own_bytes(tokenizer: ChatTokenizer) -> None:
    text = "na\u00efve \U0001f642 seven"
    ids = ids_of(tokenizer, text)
    assert b"".join(tokenizer.tokens.of(token)[1] for token in ids) == text.encode()
    assert len(ids) > len(text.split())
    eos = next(iter(tokenizer.eos_token_ids))
    assert tokenizer.tokens.of(eos)[0] == tokenizer.decode([eos], skip_special_tokens=False)


def test_a_variable_of_the_template_may_not_be_a_setting_of_the_tokenizer(tokenizer: ChatTokenizer) -> None:
    hello = [Message(role="user", content="x")]
    assert tokenizer.encode_chat(hello, {"enable_thinking": False}) == tokenizer.encode_chat(hello)
    for name in ("chat_template", "tokenize", "tools", "messages"):
        with pytest.raises(RequestError):
            tokenizer.encode_chat(hello, {name: "x"})
