"""Qwen2-Audio as real processes: token parity with plain transformers in every form, bad sounds refused."""

import base64
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.integration.audio.conftest import AudioDeployment
from tests.support.digits import assert_same_tokens, shipped, user
from tests.support.epd_client import ask, ask_epd, ids, prime, rewritten, text
from tests.support.processes import Server
from tests.support.sounds import SECONDS, AudioReference, audio_url, hear, input_audio, sound, tone, wav
from tests.unit.engine.test_audio import BAD, GOOD, encoded

Messages = list[dict[str, Any]]
Ask = Callable[..., httpx.Response]

BELL, DOG = sound(2, 1), sound(1.3, 2)
CASES: dict[str, Messages] = {
    "no sound": [{"role": "user", "content": "Hello, who are you?"}],
    "one sound": [hear(BELL, "What do you hear?")],
    "two sounds": [hear(BELL, DOG, "How do they differ?")],
    "the same two in the other order": [hear(DOG, BELL, "How do they differ?")],
    "the text first": [hear("What do you hear?", BELL)],
    "text around them": [hear("First ", BELL, " then ", DOG, " - which is louder?")],
    "the same sound twice": [hear(BELL, BELL, "Is it the same?")],
    "nothing but a sound": [hear(BELL)],
    # Two tokens: transformers takes a single one for a prompt of its first days, and raises.
    "a very short one": [hear(sound(0.061, 3), "And this?")],
    "the longest": [hear(sound(SECONDS, 4), "And this?")],
    "three lengths": [hear(sound(0.1, 5), sound(3.21, 6), sound(0.77, 7), "Which is longest?")],
    "another rate, two channels": [hear(wav(tone(1.1, 8, 44_100, 2), 44_100), "And this?")],
    "by a URL": [hear(audio_url(DOG), "What barks?")],
    "a compressed one": [hear(input_audio(encoded(tone(1, 9), "MP3"), "mp3"), "And this?")],
    "several turns": [
        {"role": "system", "content": "You are a helpful assistant."},
        hear(BELL, "What do you hear?"),
        {"role": "assistant", "content": "A bell."},
        hear("And now?", DOG),
    ],
}


def streamed_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e.startswith("data: {")]
    return [t for e in events for c in e["choices"] for t in c["token_ids"]]


@pytest.fixture(params=["aggregated", "E to PD", "proxy"])
def serve(request: pytest.FixtureRequest, audio: AudioDeployment) -> Ask:
    if request.param == "E to PD":
        return lambda messages, **fields: ask_epd(audio.encoder, audio.pd, messages, **fields)
    server = audio.proxy if request.param == "proxy" else audio.aggregated
    return lambda messages, **fields: ask(server, messages, **fields)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(serve: Ask, audio_reference: AudioReference, name: str) -> None:
    wanted = audio_reference.generate(CASES[name], 12)
    answer = serve(CASES[name], return_token_ids=True)
    assert_same_tokens(ids(answer), wanted)
    assert answer.json()["prompt_token_ids"] == wanted.prompt_ids


def test_streamed_tokens_equal_transformers(serve: Ask, audio_reference: AudioReference) -> None:
    for name in ("one sound", "text around them"):
        answer = serve(CASES[name], return_token_ids=True, stream=True)
        assert_same_tokens(streamed_ids(answer), audio_reference.generate(CASES[name], 12))


def test_mixed_requests_in_flight_at_once(serve: Ask, audio_reference: AudioReference) -> None:
    mixed = [*CASES.values()][:6] + [[hear(sound(0.3 + 0.7 * i, 20 + i), "And this?")] for i in range(6)]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda messages: serve(messages, return_token_ids=True), mixed))
    for messages, answer in zip(mixed, answers, strict=True):
        assert_same_tokens(ids(answer), audio_reference.generate(messages, 12))


def test_what_the_model_says_depends_on_the_sound(serve: Ask) -> None:
    said = {tuple(ids(serve([hear(sound(2, i), "?")], return_token_ids=True))) for i in (1, 2, 3)}
    assert len(said) == 3


def test_the_openai_client_sends_a_sound(audio: AudioDeployment) -> None:
    client = OpenAI(base_url=f"{audio.proxy.url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 8}
    messages: Any = CASES["one sound"]
    whole = client.chat.completions.create(messages=messages, **options)
    chunks = client.chat.completions.create(messages=messages, stream=True, **options)
    said = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert said == whole.choices[0].message.content


def test_the_pd_heard_nothing(audio: AudioDeployment) -> None:
    loads = audio.pd.metric("epd_engine_ec_loads_total")
    assert text(ask(audio.proxy, [hear(sound(1, 40), "And this?")])) is not None
    assert audio.pd.metric("epd_engine_ec_loads_total") == loads + 1
    assert audio.pd.metric("epd_engine_media_decoded_total") == 0
    assert audio.pd.metric("epd_engine_encoder_items_total") == 0


def test_encoder_and_pd_split_the_model_between_them(audio: AudioDeployment) -> None:
    encoder, pd, whole = (
        server.metric("epd_engine_model_parameters") for server in (audio.encoder, audio.pd, audio.aggregated)
    )
    assert 0 < encoder < whole
    assert encoder + pd == whole


def test_a_primer_says_how_many_tokens_a_sound_has(audio: AudioDeployment) -> None:
    parts = prime(audio.encoder, [hear(BELL, DOG)])
    assert [p["type"] for p in parts] == ["audio_embeds"] * 2
    assert [p["audio_embeds"] for p in parts] == [{"audio_num_tokens": 50}, {"audio_num_tokens": 32}]


@pytest.mark.parametrize("count", [0, 201, -5, "50", None, 2.0])
def test_metadata_out_of_bounds_is_refused(audio: AudioDeployment, count: object) -> None:
    (part,) = prime(audio.encoder, [hear(BELL)])
    wrong = {**part, "audio_embeds": {"audio_num_tokens": count}}
    answer = ask(audio.pd, rewritten([hear(BELL)], [wrong]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].audio_embeds"


@pytest.mark.parametrize("count", [1, 49, 200])
def test_metadata_that_does_not_fit_the_stored_tensor_is_a_miss(audio: AudioDeployment, count: int) -> None:
    fresh = [hear(sound(2, 50 + count), "What do you hear?")]
    (part,) = prime(audio.encoder, fresh)
    wrong = {**part, "audio_embeds": {"audio_num_tokens": count}}
    answer = ask(audio.pd, rewritten(fresh, [wrong]))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "ec_miss"


def bad_sounds() -> dict[str, dict[str, Any]]:
    parts = {name: input_audio(make()) for name, (make, _) in BAD.items()}
    parts["too long for the model"] = input_audio(sound(SECONDS + 1))
    parts["too short for the model"] = input_audio(sound(0.02))
    parts["text with a type of audio"] = audio_url(b"I am a song")
    parts["a private address"] = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x.wav"}}
    parts["a file"] = {"type": "audio_url", "audio_url": {"url": "file:///etc/hostname"}}
    broken = {"data": "@@@@", "format": "wav"}
    parts["broken base64"] = {"type": "input_audio", "input_audio": broken}
    return parts


BAD_SOUNDS = bad_sounds()


@pytest.mark.parametrize("name", BAD_SOUNDS)
def test_a_bad_sound_gets_400_with_its_place(audio: AudioDeployment, name: str) -> None:
    part = BAD_SOUNDS[name]
    field = "data" if part["type"] == "input_audio" else "url"
    servers: list[Server] = [audio.encoder, audio.aggregated]
    if part[part["type"]][field]:  # the proxy itself refuses an empty one
        servers.append(audio.proxy)
    for server in servers:
        answer = ask(server, [hear(BELL, part)])
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == f"messages[0].content[1].{part['type']}.{field}"
        assert error["message"].startswith(error["param"])
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("name", [n for n in GOOD if n != "wav, one sample"])
def test_an_unusual_sound_is_taken(audio: AudioDeployment, name: str) -> None:
    assert ask(audio.aggregated, [hear(GOOD[name]())], max_tokens=1).status_code == 200


def test_a_format_that_nobody_reads_is_named(audio: AudioDeployment) -> None:
    answer = ask(audio.encoder, [hear(input_audio(bytes(3200), "pcm16"))])
    assert answer.status_code == 400
    assert "'pcm16' is not known; known are wav, flac, ogg, mp3" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages[0].content[0].input_audio.format"


def test_a_sound_beyond_the_servers_limit_is_refused(audio: AudioDeployment) -> None:
    answer = ask(audio.aggregated, [hear(sound(61))])
    assert answer.status_code == 400
    assert "a sound of 61.0 seconds exceeds 60" in answer.json()["error"]["message"]


def test_more_bytes_than_allowed_are_refused_with_413(audio: AudioDeployment) -> None:
    part = {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(bytes(33 << 20)).decode(), "format": "wav"},
    }
    assert ask(audio.encoder, [hear(part)]).status_code == 413


def test_an_audio_model_takes_no_pictures(audio: AudioDeployment) -> None:
    for server in (audio.encoder, audio.aggregated):
        answer = ask(server, [user(shipped("seven"))])
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_modality"


def test_a_pd_without_tower_says_what_to_send(audio: AudioDeployment) -> None:
    answer = ask(audio.pd, CASES["one sound"])
    assert answer.status_code == 400
    assert "audio_embeds" in answer.json()["error"]["message"]
