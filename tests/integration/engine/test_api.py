"""The OpenAI surface of one instance."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.support.digits import Reference, shipped, user
from tests.support.engines import MODEL_NAME
from tests.support.epd_client import ask, text
from tests.support.processes import Server
from tests.support.waiting import eventually

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
QUESTION = [user(shipped("seven"), "What digit is this?")]


@pytest.fixture
def client(aggregated: Server) -> OpenAI:
    return OpenAI(base_url=f"{aggregated.url}/v1", api_key="none", max_retries=0)


def test_the_openai_client_gets_the_same_answer_streaming_and_not(client: OpenAI) -> None:
    options: Any = {"model": MODEL_NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    _, whole = (client.chat.completions.create(**options) for _ in range(2))  # the second knows the prompt
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_usage_comes_in_a_stream_only_when_asked_for(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL_NAME, messages=HELLO, max_tokens=2, stream=True))
    assert all(c.usage is None for c in chunks)


def test_usage_tells_how_much_of_a_prompt_was_known(client: OpenAI) -> None:
    again: Any = [{"role": "user", "content": "What is known of this? " * 12}]
    options: Any = {"model": MODEL_NAME, "messages": again, "max_tokens": 2}
    usages: list[Any] = [client.chat.completions.create(**options).usage for _ in range(2)]
    first, second = (usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert first < 32
    assert usages[1].prompt_tokens - 16 <= second < usages[1].prompt_tokens


def test_usage_of_several_choices_tells_how_much_of_the_prompt_was_known(aggregated: Server) -> None:
    known = [{"role": "user", "content": "Several answers to this, please. " * 12}]
    first, second = (ask(aggregated, known, n=3, max_tokens=2).json()["usage"] for _ in range(2))
    prompt, cached = second["prompt_tokens"], second["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens"] == prompt
    assert prompt - 16 <= cached < prompt


def test_an_answer_goes_back_into_the_next_turn_as_the_client_keeps_it(client: OpenAI) -> None:
    options: Any = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 8}
    message = client.chat.completions.create(messages=HELLO, **options).choices[0].message
    assert None in message.model_dump().values()
    again = {"role": "user", "content": "And what is this?"}
    plain = {"role": "assistant", "content": message.content}
    answers = [
        client.chat.completions.create(messages=[*HELLO, turn, again], **options)
        for turn in (plain, message, message.model_dump())
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.usage.prompt_tokens for answer in answers if answer.usage}) == 1


def test_models_are_listed_and_others_are_not_found(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL_NAME]
    with pytest.raises(NotFoundError, match="served: digits-vl"):
        client.chat.completions.create(model="other", messages=HELLO)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_ends_an_answer(aggregated: Server, name: str) -> None:
    body = {"model": MODEL_NAME, "messages": HELLO, "temperature": 0, name: 2}
    answer = httpx.post(f"{aggregated.url}/v1/chat/completions", json=body, timeout=30).json()
    assert answer["usage"]["completion_tokens"] <= 2
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_stop_string_ends_an_answer_before_it(aggregated: Server) -> None:
    whole = text(ask(aggregated, HELLO, max_tokens=40))
    assert len(whole) > 4
    stop = whole[2:4]
    answer = ask(aggregated, HELLO, max_tokens=40, stop=stop)
    assert text(answer) == whole[: whole.index(stop)]
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    streamed = ask(aggregated, HELLO, max_tokens=40, stop=stop, stream=True)
    assert "".join(deltas(streamed)) == whole[: whole.index(stop)]


def deltas(response: httpx.Response) -> list[str]:
    documents = [json.loads(e[6:]) for e in response.text.split("\n\n") if e.startswith("data: {")]
    return [d["choices"][0]["delta"].get("content") or "" for d in documents if d["choices"]]


def test_the_end_token_can_be_ignored(aggregated: Server) -> None:
    answer = ask(aggregated, HELLO, max_tokens=40, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_a_seed_repeats_an_answer_even_in_company(aggregated: Server) -> None:
    def draw(seed: int) -> str:
        return text(ask(aggregated, HELLO, temperature=2.0, seed=seed, max_tokens=24))

    alone = draw(5)
    with ThreadPoolExecutor(6) as pool:
        crowd = list(pool.map(draw, [5, 1, 2, 5, 3, 4]))
    assert crowd[0] == crowd[3] == alone
    assert len(set(crowd)) > 1


def test_greedy_is_the_default_of_this_checkpoint(aggregated: Server, reference: Reference) -> None:
    answer = ask(aggregated, HELLO, temperature=None, max_tokens=8, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == reference.generate(HELLO, 8).ids


def test_a_request_id_is_kept_or_made(aggregated: Server) -> None:
    url = f"{aggregated.url}/v1/chat/completions"
    body = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 1}
    kept = httpx.post(url, json=body, headers={"x-request-id": "abc-1"}, timeout=30)
    assert kept.headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, ""):
        made = httpx.post(url, json=body, headers={"x-request-id": bad}, timeout=30)
        assert re.fullmatch(r"[0-9a-f]{32}", made.headers["x-request-id"])
    assert '"request_id": "abc-1"' in aggregated.log.read_text()


def test_two_requests_may_carry_one_id(aggregated: Server) -> None:
    def send(_: int) -> int:
        return httpx.post(
            f"{aggregated.url}/v1/chat/completions",
            json={"model": MODEL_NAME, "messages": HELLO, "max_tokens": 8},
            headers={"x-request-id": "same"},
            timeout=30,
        ).status_code

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(send, range(4))) == [200] * 4


def test_health_ready_and_metrics_answer(aggregated: Server) -> None:
    assert httpx.get(f"{aggregated.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{aggregated.url}/ready").json() == {"status": "ready"}
    assert aggregated.metric("epd_engine_model_parameters") > 0


def test_unknown_paths_and_methods_get_openais_error_body(aggregated: Server) -> None:
    for answer in (
        httpx.get(f"{aggregated.url}/v2"),
        httpx.get(f"{aggregated.url}/v1/chat/completions"),
    ):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(aggregated: Server, stream: bool) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": HELLO,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"{aggregated.url}/v1/chat/completions"
    before = aggregated.metric("epd_engine_generated_tokens_total")
    for _ in range(4):
        try:
            with httpx.stream("POST", url, json=body, timeout=0.4) as response:
                next(response.iter_bytes())
        except httpx.TimeoutException:
            pass
    eventually(lambda: aggregated.metric("epd_engine_requests_running") == 0)
    assert aggregated.metric("epd_engine_requests_in_progress") == 0
    assert aggregated.metric("epd_engine_queued_prompt_tokens") == 0
    assert aggregated.metric("epd_engine_busy_seconds_total") > 0
    assert aggregated.metric("epd_engine_generated_tokens_total") < before + 4 * 900
    assert aggregated.metric("epd_engine_kv_cache_usage_ratio") == 0
    assert aggregated.metric("epd_engine_encoder_cache_referenced_embeddings") == 0


def test_the_prompt_and_the_limit_must_fit_the_context(aggregated: Server, client: OpenAI) -> None:
    long = [{"role": "user", "content": "seven three " * 1000}]
    with pytest.raises(BadRequestError, match="the model's context is 1024") as caught:
        client.chat.completions.create(model=MODEL_NAME, messages=long)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    answer = ask(aggregated, HELLO, max_tokens=5000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def refused(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code


def test_a_placeholder_in_the_text_is_refused(aggregated: Server) -> None:
    refused(ask(aggregated, [user("What is <|image_pad|>?")]), 400, "invalid_value")


def test_audio_is_refused_by_a_model_without_audio(aggregated: Server) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    answer = ask(aggregated, [{"role": "user", "content": [part]}])
    refused(answer, 400, "unsupported_modality")
    assert "takes no audio" in answer.json()["error"]["message"]


def test_too_many_pictures_are_refused(aggregated: Server) -> None:
    refused(ask(aggregated, [user(*[shipped("seven")] * 5)]), 400, "too_many_media")


BAD_BODIES: dict[str, Callable[[], bytes]] = {
    "not JSON": lambda: b"{",
    "not an object": lambda: b"[1]",
    "not UTF-8": lambda: b'{"model": "\xff"}',
    "deeply nested": lambda: b"[" * 100_000,
    "empty": lambda: b"",
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_gets_400_and_the_server_goes_on(aggregated: Server, name: str) -> None:
    answer = httpx.post(f"{aggregated.url}/v1/chat/completions", content=BAD_BODIES[name](), timeout=30)
    refused(answer, 400, "invalid_value")
    assert text(ask(aggregated, HELLO, max_tokens=2)) is not None


def test_refusals_are_counted_by_code(aggregated: Server) -> None:
    before = aggregated.metric("epd_engine_requests_total", status="400", code="unsupported_modality")
    test_audio_is_refused_by_a_model_without_audio(aggregated)
    after = aggregated.metric("epd_engine_requests_total", status="400", code="unsupported_modality")
    assert after == before + 1
