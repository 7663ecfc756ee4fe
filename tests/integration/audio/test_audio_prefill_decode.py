"""Sounds through encoder, prefill and decode: the tokens are those of plain transformers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.audio.conftest import AudioDeployment
from tests.integration.audio.test_audio import CASES
from tests.support.digits import assert_same_tokens
from tests.support.engines import engine
from tests.support.epd_client import ids
from tests.support.kv_client import ask_split, kv_flags, nixl_flags
from tests.support.processes import Server, running
from tests.support.sounds import AudioReference


@pytest.fixture(scope="module", params=["files", "nixl"])
def pair(
    request: pytest.FixtureRequest,
    audio: AudioDeployment,
    audio_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("split")
    producer, consumer = (
        nixl_flags(role) if request.param == "nixl" else kv_flags(role, folder / "kv")
        for role in ("kv_producer", "kv_consumer")
    )
    prefill = engine(
        "prefill", folder, role="ec_consumer", store=audio.store, model=audio_model, extra=producer
    )
    decode = engine("decode", folder, model=audio_model, extra=consumer)
    with running(prefill, decode):
        yield prefill, decode


def test_greedy_tokens_equal_transformers(
    audio: AudioDeployment, pair: tuple[Server, Server], audio_reference: AudioReference
) -> None:
    """All at once."""
    prefill, decode = pair
    with ThreadPoolExecutor(len(CASES)) as pool:
        answers = list(
            pool.map(
                lambda messages: ask_split(audio.encoder, prefill, decode, messages, return_token_ids=True),
                CASES.values(),
            )
        )
    for messages, answer in zip(CASES.values(), answers, strict=True):
        assert_same_tokens(ids(answer), audio_reference.generate(messages, 12))
    assert decode.metric("epd_engine_prompt_tokens_total") == 0
    assert decode.metric("epd_engine_encoder_items_total") == 0
