import json

import pytest
from pydantic import ValidationError

from epd_engine.core.request import RequestError
from epd_engine.server.errors import invalid_request
from epd_engine.server.protocol import ChatCompletionRequest

KEY = "ab" * 32
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(body: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps(body))


def problem(body: object) -> RequestError:
    with pytest.raises(ValidationError) as caught:
        parse(body)
    return invalid_request(caught.value)


def with_part(part: object) -> dict:
    return {**GOOD, "messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "x"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}, "uuid": "cat-1"},
        {"type": "audio_url", "audio_url": {"url": "data:,"}},
        {"type": "video_url", "video_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": KEY},
    ],
)
def test_every_kind_of_part_is_understood(part: dict) -> None:
    assert parse(with_part(part)).messages[0].content[0].type == part["type"]


def test_fields_that_do_not_change_the_answer_are_left_alone() -> None:
    body = parse({**GOOD, "user": "u", "metadata": {"a": "b"}, "n": 1, "tools": None, "logit_bias": {}})
    assert body.model == "m"


def test_a_stop_may_be_one_string() -> None:
    assert parse({**GOOD, "stop": "x"}).stop == ["x"]


@pytest.mark.parametrize("name", ["n", "logprobs", "tools", "response_format", "frequency_penalty", "top_k"])
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str) -> None:
    error = problem({**GOOD, name: 2})
    assert error.status == 400
    assert f"{name} is not supported yet" in str(error)


def test_an_unknown_field_is_refused_by_name() -> None:
    assert "temprature" in str(problem({**GOOD, "temprature": 1}))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({}, "model"),
        ({"model": "m"}, "messages"),
        ({**GOOD, "model": 3}, "model"),
        ({**GOOD, "messages": []}, "messages"),
        ({**GOOD, "messages": "hi"}, "messages"),
        ({**GOOD, "messages": [3]}, "messages[0]"),
        ({**GOOD, "messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({**GOOD, "messages": [{"role": "user"}]}, "messages[0].content"),
        ({**GOOD, "messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (with_part({"type": "smell"}), "messages[0].content[0]"),
        (with_part("x"), "messages[0].content[0]"),
        (with_part({"type": "text"}), "messages[0].content[0].text"),
        (with_part({"type": "image_url", "image_url": "u"}), "messages[0].content[0].image_url"),
        (with_part({"type": "image_url", "image_url": {"url": 3}}), "messages[0].content[0].image_url.url"),
        (
            with_part({"type": "image_url", "image_url": {"url": "x"}, "uuid": "../x"}),
            "messages[0].content[0].uuid",
        ),
        (
            with_part({"type": "image_embeds", "image_embeds": {}, "uuid": "../" + "a" * 61}),
            "messages[0].content[0].uuid",
        ),
        (with_part({"type": "image_embeds", "image_embeds": {}}), "messages[0].content[0].uuid"),
        (
            with_part({"type": "image_embeds", "image_embeds": [], "uuid": KEY}),
            "messages[0].content[0].image_embeds",
        ),
        ({**GOOD, "max_tokens": 0}, "max_tokens"),
        ({**GOOD, "max_tokens": "4"}, "max_tokens"),
        ({**GOOD, "temperature": -1}, "temperature"),
        ({**GOOD, "temperature": "hot"}, "temperature"),
        ({**GOOD, "top_p": 0}, "top_p"),
        ({**GOOD, "seed": 2**70}, "seed"),
        ({**GOOD, "stop": [""]}, "stop"),
        ({**GOOD, "stop": [3]}, "stop[0]"),
        ({**GOOD, "stream": "yes"}, "stream"),
        ({**GOOD, "stream_options": {"include": True}}, "stream_options.include"),
        ({**GOOD, "cache_salt": 1}, "cache_salt"),
        ({**GOOD, "mm_processor_kwargs": []}, "mm_processor_kwargs"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(body: object, param: str | None) -> None:
    error = problem(body)
    assert (error.status, error.param) == (400, param)
    assert param is None or param in str(error)


def test_a_body_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(b"{")
    assert "JSON" in str(invalid_request(caught.value))
