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


@pytest.mark.parametrize("name", ["tools", "tool_choice", "functions", "modalities", "bad_words", "best_of"])
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str) -> None:
    error = problem({**GOOD, name: 2})
    assert error.status == 400
    assert f"{name} is not supported" in str(error)


def test_what_asks_for_nothing_is_taken() -> None:
    parse({**GOOD, "tools": [], "tool_choice": "auto", "modalities": ["text"], "best_of": 1, "echo": False})


SAMPLING: dict[str, object] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": -1,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "logit_bias": {"5": -100, "6": 1.5},
    "seed": -1,
    "logprobs": True,
    "top_logprobs": 20,
    "stop_token_ids": [7],
    "min_tokens": 2,
    "max_tokens": 9,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "priority": -5,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "chat_template_kwargs": {"enable_thinking": False},
}


def test_what_clients_of_vllm_send_is_taken() -> None:
    body = parse({**GOOD, **SAMPLING})
    for name, value in SAMPLING.items():
        if name != "stream_options":
            assert getattr(body, name) == value


@pytest.mark.parametrize(
    ("role", "field"),
    [
        ("assistant", "refusal"),
        ("assistant", "tool_calls"),
        ("assistant", "function_call"),
        ("assistant", "reasoning_content"),
        ("assistant", "audio"),
        ("user", "name"),
    ],
)
def test_null_in_a_message_is_the_same_as_leaving_it_out(role: str, field: str) -> None:
    message = {"role": role, "content": "x"}
    assert parse({**GOOD, "messages": [{**message, field: None}]}) == parse({**GOOD, "messages": [message]})


@pytest.mark.parametrize("field", ["tool_calls", "annotations"])
def test_an_empty_list_of_an_answer_is_the_same_as_leaving_it_out(field: str) -> None:
    message = {"role": "assistant", "content": "x"}
    assert parse({**GOOD, "messages": [{**message, field: []}]}) == parse({**GOOD, "messages": [message]})
    with pytest.raises(ValidationError):
        parse({**GOOD, "messages": [{**message, field: [{}]}]})
    with pytest.raises(ValidationError):
        parse({**GOOD, "messages": [{"role": "user", "content": "x", field: []}]})


def test_null_is_the_same_as_leaving_a_field_out_at_every_level() -> None:
    options = parse({**GOOD, "stream_options": {"include_usage": None}}).stream_options
    assert options is not None
    assert not options.include_usage
    url = {"type": "image_url", "image_url": {"url": "data:,", "detail": None}, "uuid": None}
    assert parse(with_part(url)).messages[0].content[0].uuid is None
    assert parse({**GOOD, "structured_outputs": {"regex": "a", "json": None}}).structure is not None


def test_null_inside_a_value_that_is_free_is_kept() -> None:
    schema = {"enum": [None, 1], "default": None}
    assert parse({**GOOD, "guided_json": schema}).guided_json == schema
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    structure = parse({**GOOD, "response_format": form}).structure
    assert structure is not None
    assert structure[1].json_ == schema
    options = {"enable_thinking": None}
    assert parse({**GOOD, "chat_template_kwargs": options}).chat_template_kwargs == options


@pytest.mark.parametrize("silence", [{"content": None}, {}, {"content": None, "tool_calls": None}])
def test_an_assistant_may_have_said_nothing(silence: dict) -> None:
    body = parse({**GOOD, "messages": [*GOOD["messages"], {"role": "assistant", **silence}]})
    assert body.messages[1].content == ""


SCHEMA = {"type": "object", "properties": {"digit": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "param", "form"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "response_format", {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "response_format",
            {"json_": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs", {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs", {"json_": "{}"}),
        ({"guided_json": SCHEMA}, "guided_json", {"json_": SCHEMA}),
        ({"guided_regex": "a+"}, "guided_regex", {"regex": "a+"}),
        ({"guided_choice": ["a"]}, "guided_choice", {"choice": ["a"]}),
    ],
)
def test_every_way_to_ask_for_a_structure_is_one(fields: dict, param: str | None, form: dict | None) -> None:
    structure = parse({**GOOD, **fields}).structure
    if structure is None:
        assert param is None
        return
    assert structure[0] == param
    assert structure[1].model_dump(exclude_none=True) == form


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens exceeds"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex contradict"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos contradicts"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens contradicts"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict, words: str) -> None:
    error = problem({**GOOD, **fields})
    assert error.status == 400
    assert words in str(error)


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
        ({**GOOD, "messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {**GOOD, "messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
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
        ({**GOOD, "n": 0}, "n"),
        ({**GOOD, "n": 17}, "n"),
        ({**GOOD, "top_k": -2}, "top_k"),
        ({**GOOD, "min_p": 1.5}, "min_p"),
        ({**GOOD, "repetition_penalty": 0}, "repetition_penalty"),
        ({**GOOD, "presence_penalty": 3}, "presence_penalty"),
        ({**GOOD, "frequency_penalty": "x"}, "frequency_penalty"),
        ({**GOOD, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**GOOD, "logit_bias": {"-1": 1}}, "logit_bias"),
        ({**GOOD, "logit_bias": {"1": 200}}, "logit_bias.1"),
        ({**GOOD, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({**GOOD, "logprobs": 3}, "logprobs"),
        ({**GOOD, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({**GOOD, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({**GOOD, "min_tokens": -1}, "min_tokens"),
        ({**GOOD, "priority": 1.5}, "priority"),
        ({**GOOD, "response_format": {"type": "xml"}}, "response_format.type"),
        ({**GOOD, "response_format": {"type": "json_schema"}}, "response_format"),
        (
            {**GOOD, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({**GOOD, "structured_outputs": {}}, "structured_outputs"),
        ({**GOOD, "structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({**GOOD, "guided_choice": []}, "guided_choice"),
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
