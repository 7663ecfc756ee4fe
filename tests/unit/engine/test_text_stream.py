import pytest

from epd_engine.models.checkpoint import Checkpoint
from epd_engine.server.protocol import Message
from epd_engine.server.text import ChatTokenizer, TextStream
from tests.support.digits import MODEL


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(Checkpoint(MODEL))


def ids_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer._tokenizer(text, add_special_tokens=False)["input_ids"]


def stream(tokenizer: ChatTokenizer, text: str, *stop: str) -> list[str]:
    """The pieces that come out when `text` goes in token by token."""
    ids = ids_of(tokenizer, text)
    out = TextStream(tokenizer, stop)
    pieces = []
    for at, token in enumerate(ids):
        pieces.append(out.push([token], last=at == len(ids) - 1))
        if out.stopped:
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
    out = TextStream(tokenizer, ())
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
    out = TextStream(tokenizer, ())
    eos = next(iter(tokenizer.eos_token_ids))
    assert out.push([*ids_of(tokenizer, "seven"), eos], last=True) == "seven"


def test_a_developer_message_is_a_system_message_to_the_template(tokenizer: ChatTokenizer) -> None:
    system = tokenizer.encode_chat([Message(role="system", content="x")])
    assert tokenizer.encode_chat([Message(role="developer", content="x")]) == system
