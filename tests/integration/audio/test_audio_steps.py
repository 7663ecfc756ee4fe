"""Sounds through chunks, preemption and beginnings that are known: token parity with plain transformers, in
process."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.digits import assert_same_tokens
from tests.support.in_process import Answered, InProcess
from tests.support.sounds import AudioReference, hear, sound

TOKENS = 8
CHATS = [
    [hear(sound(0.4 + 0.9 * n, 60 + n), "What do you hear? Please say it in a few words.")] for n in range(6)
] + [
    [hear("First ", sound(1.3, 70), " then ", sound(0.5, 71), " - which is louder?")],
    [{"role": "user", "content": "Hello, who are you?"}],
]


@contextmanager
def started(model: Path, **config: Any) -> Iterator[InProcess]:
    limits = {"max_model_len": 384, "kv_cache_tokens": 8192, "encoder_cache_size": 256}
    with closing(InProcess(model, **limits | config)) as engine:
        yield engine


def assert_parity(
    engine: InProcess, reference: AudioReference, chats: Sequence[list[dict[str, Any]]] = CHATS
) -> list[Answered]:
    answers = engine.ask(chats, max_tokens=TOKENS)
    for messages, answer in zip(chats, answers, strict=True):
        wanted = reference.generate(messages, TOKENS)
        assert answer.request.prompt_token_ids == wanted.prompt_ids
        assert_same_tokens(answer.ids, wanted)
    return answers


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_in_chunks(audio_model: Path, audio_reference: AudioReference, chunk: int) -> None:
    with started(audio_model, max_num_batched_tokens=chunk) as engine:
        assert_parity(engine, audio_reference, CHATS[:2] + CHATS[6:] if chunk == 1 else CHATS)


def test_preemption_for_lack_of_kv_blocks(audio_model: Path, audio_reference: AudioReference) -> None:
    with started(audio_model, kv_cache_tokens=384, max_num_batched_tokens=64) as engine:
        assert_parity(engine, audio_reference)
        assert engine.preemptions > 0


def test_sounds_that_take_turns_in_the_encoder_cache(
    audio_model: Path, audio_reference: AudioReference
) -> None:
    with started(audio_model, encoder_cache_size=200) as engine:
        assert_parity(engine, audio_reference)


def test_beginnings_that_are_known_already(audio_model: Path, audio_reference: AudioReference) -> None:
    """Another sound of the same length in the same place is another beginning."""
    (question,) = [part["text"] for part in CHATS[0][0]["content"] if part["type"] == "text"]
    with started(audio_model, block_size=4) as engine:
        assert_parity(engine, audio_reference, CHATS[:1])
        (again,) = assert_parity(engine, audio_reference, CHATS[:1])
        assert again.request.num_cached_tokens >= again.request.media[0].end
        (other,) = assert_parity(engine, audio_reference, [[hear(sound(0.4, 99), question)]])
        assert other.request.num_cached_tokens <= other.request.media[0].offset
