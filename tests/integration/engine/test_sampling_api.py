"""How tokens are chosen, as clients see it over HTTP."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from tests.support.digits import Reference, shipped, user
from tests.support.engines import MODEL_NAME, engine
from tests.support.epd_client import ask, ids, rewritten, text
from tests.support.processes import Server, running
from tests.support.waiting import eventually

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
HOT: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, "return_token_ids": True}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(e[6:]) for e in response.text.split("\n\n") if e.startswith("data: {")]


def streamed(response: httpx.Response) -> dict[int, dict[str, Any]]:
    """The choices that a stream adds up to, by index."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks(response):
        for choice in chunk["choices"]:
            entry = made.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "reason": None})
            assert entry["reason"] is None, "nothing follows a choice's end"
            entry["text"] += choice["delta"].get("content") or ""
            entry["ids"] += choice.get("token_ids", [])
            entry["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            entry["reason"] = choice["finish_reason"]
    return made


def refused(answer: httpx.Response, param: str | None, words: str) -> None:
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


# Log probabilities


def reference_logprobs(reference: Reference, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        tokens = torch.tensor([prompt + answer])
        logits = reference.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    return torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_logprobs_are_those_of_transformers(
    aggregated: Server, reference: Reference, temperature: float
) -> None:
    fields = {"temperature": temperature, "top_k": 20, "frequency_penalty": 0.5, "logit_bias": {"30": -3}}
    got = ask(
        aggregated, HELLO, **HOT | fields, logprobs=True, top_logprobs=5, seed=4, ignore_eos=True
    ).json()
    choice = got["choices"][0]
    wanted = reference_logprobs(reference, got["prompt_token_ids"], choice["token_ids"])
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == 16
    for row, (token, said) in enumerate(zip(choice["token_ids"], content, strict=True)):
        assert said["logprob"] == pytest.approx(float(wanted[row, token]), abs=1e-4)
        best = [alternative["logprob"] for alternative in said["top_logprobs"]]
        assert best == pytest.approx(wanted[row].topk(5).values.tolist(), abs=1e-4)
    assert b"".join(bytes(said["bytes"]) for said in content).decode(errors="replace")


def test_logprobs_come_with_their_tokens_in_a_stream(aggregated: Server) -> None:
    fields = HOT | {"logprobs": True, "top_logprobs": 2, "seed": 9}
    whole = ask(aggregated, HELLO, **fields).json()["choices"][0]
    parts = streamed(ask(aggregated, HELLO, **fields, stream=True))[0]
    assert parts["ids"] == whole["token_ids"]
    assert [p["token"] for p in parts["logprobs"]] == [p["token"] for p in whole["logprobs"]["content"]]
    assert [p["logprob"] for p in parts["logprobs"]] == pytest.approx(
        [p["logprob"] for p in whole["logprobs"]["content"]], abs=1e-4
    )


def test_the_openai_client_reads_logprobs_and_choices(aggregated: Server) -> None:
    client = OpenAI(base_url=f"{aggregated.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=HELLO,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=3,
        n=2,
        max_tokens=4,
        seed=1,
        temperature=1,
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


# Several answers


def test_each_choice_is_the_only_answer_of_its_seed(aggregated: Server) -> None:
    together = ask(aggregated, HELLO, **HOT, n=3, seed=20).json()
    alone = [ask(aggregated, HELLO, **HOT, seed=20 + i).json() for i in range(3)]
    assert [c["index"] for c in together["choices"]] == [0, 1, 2]
    assert [c["token_ids"] for c in together["choices"]] == [a["choices"][0]["token_ids"] for a in alone]
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert together["usage"]["completion_tokens"] == sum(a["usage"]["completion_tokens"] for a in alone)


def test_choices_of_a_picture_stream_with_their_index(aggregated: Server) -> None:
    question = [user(shipped("seven"), "What digit is this?")]
    fields = HOT | {"n": 3, "seed": 3}
    whole = ask(aggregated, question, **fields).json()["choices"]
    answer = ask(aggregated, question, **fields, stream=True, stream_options={"include_usage": True})
    parts = streamed(answer)
    assert [parts[i]["text"] for i in range(3)] == [c["message"]["content"] for c in whole]
    assert [parts[i]["ids"] for i in range(3)] == [c["token_ids"] for c in whole]
    assert chunks(answer)[-1]["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole)


def test_usage_may_come_with_every_chunk(aggregated: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask(aggregated, HELLO, max_tokens=6, stream=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks(answer)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_a_client_that_goes_away_frees_all_of_its_choices(aggregated: Server) -> None:
    body = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "n": 4}
    for stream in (True, False):
        try:
            with httpx.stream(
                "POST", f"{aggregated.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=0.4
            ) as response:
                next(response.iter_bytes())
        except httpx.TimeoutException:
            pass
    eventually(lambda: aggregated.metric("epd_engine_requests_running") == 0)
    assert aggregated.metric("epd_engine_requests_waiting") == 0
    assert aggregated.metric("epd_engine_kv_cache_usage_ratio") == 0


# Which token


def test_a_repetition_penalty_is_transformers(aggregated: Server, reference: Reference) -> None:
    got = ask(
        aggregated, HELLO, max_tokens=24, repetition_penalty=1.4, ignore_eos=True, return_token_ids=True
    )
    prompt = torch.tensor([got.json()["prompt_token_ids"]])
    with torch.inference_mode():
        wanted = reference.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.4,
            eos_token_id=[],
        )
    assert ids(got) == wanted[0, prompt.shape[1] :].tolist()


def test_a_bias_forces_or_bans_a_token(aggregated: Server) -> None:
    plain = ids(ask(aggregated, HELLO, max_tokens=3, return_token_ids=True))
    forced = ask(aggregated, HELLO, max_tokens=3, return_token_ids=True, logit_bias={"300": 100})
    assert ids(forced) == [300] * 3
    banned = ask(aggregated, HELLO, max_tokens=3, return_token_ids=True, logit_bias={str(plain[0]): -100})
    assert plain[0] not in ids(banned)


def test_one_best_token_is_greedy_at_any_temperature(aggregated: Server) -> None:
    greedy = text(ask(aggregated, HELLO, max_tokens=10))
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert text(ask(aggregated, HELLO, max_tokens=10, temperature=2, **fields)) == greedy


def test_a_seed_holds_beside_requests_of_every_kind(aggregated: Server) -> None:
    wanted = HOT | {"seed": 77, "top_p": 0.95, "presence_penalty": 0.4, "ignore_eos": True}
    alone = ids(ask(aggregated, HELLO, **wanted))
    company: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1, "logprobs": True, "top_logprobs": 4},
        {"repetition_penalty": 1.5},
        {"temperature": 2, "guided_regex": "[0-9]{5,9}"},
    ]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, aggregated, HELLO, **{"max_tokens": 30, **c}) for c in company]
        crowded = [pool.submit(ask, aggregated, HELLO, **wanted) for _ in range(3)]
        assert all(f.result().status_code == 200 for f in futures)
        assert [ids(f.result()) for f in crowded] == [alone] * 3


# Where an answer ends


def test_a_stop_token_ends_an_answer_before_it(aggregated: Server) -> None:
    whole = ask(aggregated, HELLO, max_tokens=20, return_token_ids=True)
    tokens = ids(whole)
    stop = tokens[3]
    end = tokens.index(stop) + 1
    answer = ask(aggregated, HELLO, max_tokens=20, return_token_ids=True, stop_token_ids=[stop])
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == tokens[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    kept = ask(aggregated, HELLO, max_tokens=20, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert text(whole).startswith(text(kept))
    assert len(text(kept)) > len(text(answer))
    stream = ask(aggregated, HELLO, max_tokens=20, stop_token_ids=[stop], stream=True)
    assert streamed(stream)[0]["text"] == text(answer)


def test_a_stop_string_may_be_kept_and_is_named(aggregated: Server) -> None:
    whole = text(ask(aggregated, HELLO, max_tokens=40))
    stop = whole[2:5]
    answer = ask(aggregated, HELLO, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert text(answer) == whole[: whole.index(stop) + len(stop)]
    assert answer.json()["choices"][0]["stop_reason"] == stop


def test_an_answer_may_not_end_before_its_least_length(aggregated: Server) -> None:
    short = ask(aggregated, HELLO, max_tokens=200)
    assert short.json()["choices"][0]["finish_reason"] == "stop"
    least = short.json()["usage"]["completion_tokens"] + 7
    longer = ask(aggregated, HELLO, max_tokens=200, min_tokens=least)
    assert longer.json()["usage"]["completion_tokens"] > least - 1
    assert text(longer).startswith(text(short))


def test_special_tokens_are_shown_when_asked_for(aggregated: Server, reference: Reference) -> None:
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    shown = text(ask(aggregated, HELLO, max_tokens=200, **fields))
    assert shown == text(ask(aggregated, HELLO, max_tokens=200)) + reference.tokenizer.eos_token


# Structured answers

SCHEMA = {
    "type": "object",
    "properties": {
        "digit": {"type": "integer", "minimum": 0, "maximum": 9},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "sure": {"enum": ["yes", "no", None]},
    },
    "required": ["digit", "words", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "reading", "schema": SCHEMA, "strict": True}}


def assert_fits(content: str) -> None:
    read = json.loads(content)
    assert set(read) == {"digit", "words", "sure"}
    assert type(read["digit"]) is int
    assert 0 <= read["digit"] <= 9
    assert all(type(word) is str and len(word) <= 4 for word in read["words"])
    assert len(read["words"]) <= 2
    assert read["sure"] in ("yes", "no", None)


def test_a_schema_is_followed_at_any_temperature(aggregated: Server) -> None:
    def draw(seed: int) -> httpx.Response:
        fields = {"temperature": 2.0 * (seed > 0), "seed": seed, "max_tokens": 900, "stream": seed % 2 == 1}
        return ask(aggregated, HELLO, response_format=FORMAT, **fields)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(draw, range(16)))
    contents = [streamed(a)[0]["text"] if at % 2 else text(a) for at, a in enumerate(answers)]
    for content in contents:
        assert_fits(content)
    assert len(set(contents)) > 10


def test_any_object_is_json_when_it_ends(aggregated: Server) -> None:
    for seed in range(6):
        answer = ask(
            aggregated,
            HELLO,
            response_format={"type": "json_object"},
            temperature=1.0,
            seed=seed,
            max_tokens=400,
        )
        if answer.json()["choices"][0]["finish_reason"] == "stop":
            assert isinstance(json.loads(text(answer)), dict)
        else:
            assert text(answer).lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["seven", "nine", 'a "b"']}, {"seven", "nine", 'a "b"'}),
        ({"structured_outputs": {"regex": "[ab]"}}, {"a", "b"}),
        ({"guided_json": {"const": 5}}, {"5"}),
        ({"structured_outputs": {"json": '{"enum": ["x", 7]}'}}, {'"x"', "7"}),
    ],
)
def test_vllms_ways_to_ask_for_a_structure(
    aggregated: Server, fields: dict[str, Any], allowed: set[str]
) -> None:
    for seed in range(4):
        answer = ask(aggregated, HELLO, temperature=2.0, seed=seed, max_tokens=40, **fields)
        assert text(answer).strip() in allowed
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "banana"}}, "guided_json", "banana"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": "{"}, "guided_json", "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "at most 65536"),
        ({"guided_regex": "(a"}, "guided_regex", "regex"),
        ({"guided_regex": "[^\\s\\S]"}, None, "cannot be followed any further"),
        ({"guided_choice": ["x" * 70_000]}, "guided_choice", "at most 65536"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
            "response_format",
            "response_format",
        ),
        ({"logit_bias": {"512": 1}}, "logit_bias", "512 tokens"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    aggregated: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    refused(ask(aggregated, HELLO, **fields), param, words)


# Roles


def test_an_encoder_ignores_how_tokens_are_chosen(encoder: Server, pd: Server) -> None:
    question = [user(shipped("three"), "What digit is this?")]
    fields = {"n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1, "top_k": 5, "guided_regex": "x"}
    primed = ask(encoder, question, **fields, max_tokens=1).json()
    assert [c["index"] for c in primed["choices"]] == [0]
    (key, said), *_ = primed["ec_transfer_params"].items()
    part = {"type": "image_embeds", "image_embeds": said["metadata"], "uuid": key}
    answer = ask(pd, rewritten(question, [part]), n=2, temperature=1, seed=1, logprobs=True)
    assert [c["index"] for c in answer.json()["choices"]] == [0, 1]


# Limits


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Server]:
    """An instance with room for two that wait."""
    server = engine("narrow", folder, extra=["--max-num-seqs", "1", "--max-waiting", "2"])
    with running(server):
        yield server


def test_more_choices_than_there_is_room_for_is_429_and_leaves_nothing(narrow: Server) -> None:
    for stream in (False, True):
        full = ask(narrow, HELLO, n=8, temperature=1, max_tokens=50, ignore_eos=True, stream=stream)
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "queue_full"
    eventually(lambda: narrow.metric("epd_engine_requests_running") == 0)
    assert narrow.metric("epd_engine_requests_waiting") == 0
    assert len(ask(narrow, HELLO, n=2, temperature=1).json()["choices"]) == 2


def test_requests_whose_bodies_are_still_coming_take_places_too(narrow: Server) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    with ExitStack() as slow:
        for _ in range(3):
            slow.enter_context(socket.create_connection(("127.0.0.1", narrow.port))).sendall(head)
        eventually(lambda: ask(narrow, HELLO).status_code == 429)
        full = ask(narrow, HELLO)
        assert full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["retry-after"]) >= 1
    eventually(lambda: ask(narrow, HELLO).status_code == 200)


def test_a_lower_priority_is_served_earlier(narrow: Server) -> None:
    url, order = f"{narrow.url}/v1/chat/completions", []
    long = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 4000, "ignore_eos": True, "stream": True}

    def send(priority: int) -> None:
        tokens = 20 if priority < 0 else 400
        assert ask(narrow, HELLO, priority=priority, max_tokens=tokens, ignore_eos=True).status_code == 200
        order.append(priority)

    with ThreadPoolExecutor(2) as pool:
        with httpx.stream("POST", url, json=long, timeout=60) as busy:
            received = busy.iter_bytes()  # dropping it would close the connection
            next(received)
            later = pool.submit(send, 5)
            eventually(lambda: narrow.metric("epd_engine_requests_waiting") == 1)
            sooner = pool.submit(send, -5)
            eventually(lambda: narrow.metric("epd_engine_requests_waiting") == 2)
        later.result()
        sooner.result()
    assert order == [-5, 5]
