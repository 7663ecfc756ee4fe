"""E -> P -> D as real processes: the tokens are those of plain transformers, and D computes no prompt."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.engine.test_parity import CASES, SEVEN, THREE, noise
from tests.support.digits import Reference, assert_same_tokens, user
from tests.support.engines import engine
from tests.support.epd_client import ask, ids
from tests.support.kv_client import (
    Messages,
    ask_prefill,
    ask_split,
    for_language,
    handed_on,
    kv_flags,
    nixl_flags,
    transfers_in,
)
from tests.support.processes import Server, running
from tests.support.waiting import eventually

BLOCK = 16
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def area(folder: Path) -> Path:
    return folder / "kv"


@pytest.fixture(scope="module", params=["files", "nixl"])
def flags(request: pytest.FixtureRequest, area: Path) -> Callable[[str], list[str]]:
    """Those of a role, with one connector or the other."""
    return nixl_flags if request.param == "nixl" else lambda role: kv_flags(role, area)


@pytest.fixture(scope="module")
def pair(folder: Path, store: Path, flags: Callable[[str], list[str]]) -> Iterator[tuple[Server, Server]]:
    """P takes 96 tokens a step, so that longer prompts become several files."""
    limits = ["--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 4}']
    chunked = ["--max-num-batched-tokens", "96", *flags("kv_producer")]
    prefill = engine("prefill", folder, role="ec_consumer", store=store, extra=limits + chunked)
    decode = engine("decode", folder, extra=limits + flags("kv_consumer"))
    with running(prefill, decode):
        yield prefill, decode


@pytest.fixture
def serve(pair: tuple[Server, Server], encoder: Server, area: Path) -> Iterator[Ask]:
    """Asks in the split form; afterwards nothing is left anywhere, and D has computed no prompt."""
    prefill, decode = pair
    yield lambda messages, **fields: ask_split(encoder, prefill, decode, messages, **fields)
    for server in pair:
        eventually(lambda s=server: s.metric("epd_engine_requests_running") == 0)  # type: ignore[misc]
        eventually(lambda s=server: s.metric("epd_engine_kv_cache_usage_ratio") == 0)  # type: ignore[misc]
        assert server.metric("epd_engine_integrity_problems") == 0
    assert decode.metric("epd_engine_prompt_tokens_total") == 0
    assert decode.metric("epd_engine_encoder_items_total") == 0
    assert decode.metric("epd_engine_ec_loads_total") == 0
    eventually(lambda: transfers_in(area) == [])


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(serve: Ask, reference: Reference, name: str) -> None:
    wanted = reference.generate(CASES[name], 12)
    answer = serve(CASES[name], return_token_ids=True)
    assert_same_tokens(ids(answer), wanted)
    assert answer.json()["prompt_token_ids"] == wanted.prompt_ids
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(wanted.prompt_ids)
    assert usage["completion_tokens"] == len(ids(answer))


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("picture", [False, True])
@pytest.mark.parametrize("again", ["first", "again"])
def test_prompts_across_the_edge_of_a_block(
    serve: Ask, reference: Reference, over: int, picture: bool, again: str
) -> None:
    """The second time, both prefix caches know the prompt."""
    content = [SEVEN] if picture else []
    candidates = ([user(*content, "What digit is this?" + "!" * n)] for n in range(64))
    messages = next(m for m in candidates if len(reference.prompt_ids(m)) % BLOCK == over % BLOCK)
    wanted = reference.generate(messages, 12)
    assert len(wanted.prompt_ids) % BLOCK == over % BLOCK
    assert_same_tokens(ids(serve(messages, return_token_ids=True)), wanted)


def test_a_conversation_goes_on_from_what_is_known(
    serve: Ask, reference: Reference, pair: tuple[Server, Server]
) -> None:
    messages: Messages = [user("Look at this: ", SEVEN, "What digit is this? " + "Tell me. " * 12)]
    for turn in range(3):
        before = [s.metric("epd_engine_cached_prompt_tokens_total") for s in pair]
        answer = serve(messages, return_token_ids=True)
        assert_same_tokens(ids(answer), reference.generate(messages, 12))
        if turn:
            for server, known in zip(pair, before, strict=True):
                assert server.metric("epd_engine_cached_prompt_tokens_total") > known
        said = answer.json()["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}, user("And this?", THREE)]


def test_sixteen_mixed_requests_in_flight_at_once(serve: Ask, reference: Reference) -> None:
    mixed = [*CASES.values()][:8]
    mixed += [[user(noise(20 + 13 * i, 120 - 7 * i, i), "What digit is this?")] for i in range(8)]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda messages: serve(messages, return_token_ids=True), mixed))
    for messages, answer in zip(mixed, answers, strict=True):
        assert_same_tokens(ids(answer), reference.generate(messages, 12))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4, "logprobs": True, "top_logprobs": 3},
        {"logprobs": True},
        {"min_tokens": 9},
        {"ignore_eos": True, "max_tokens": 30},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"stop": ["e"]},
        {"structured_outputs": {"choice": ["one", "three", "seven"]}},
        {"logit_bias": {"100": 100}, "max_tokens": 3},
    ],
    ids=lambda f: "-".join(f),
)
def test_an_answer_is_that_of_one_instance(serve: Ask, aggregated: Server, fields: dict[str, Any]) -> None:
    messages = CASES["two pictures"]
    (ours,) = serve(messages, return_token_ids=True, **fields).json()["choices"]
    (wanted,) = ask(aggregated, messages, return_token_ids=True, **fields).json()["choices"]
    for choice in (ours, wanted):
        for said in (choice["logprobs"] or {"content": []})["content"]:
            said["logprob"] = round(said["logprob"], 3)
            said["top_logprobs"] = [(t["token"], round(t["logprob"], 3)) for t in said["top_logprobs"]]
    assert ours == wanted


def test_a_stream_has_the_first_token_once(serve: Ask, aggregated: Server) -> None:
    messages = CASES["one picture"]
    answer = serve(messages, stream=True, return_token_ids=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    streamed = [token for event in events for c in event["choices"] for token in c["token_ids"]]
    assert streamed == ids(ask(aggregated, messages, return_token_ids=True))
    assert answer.text.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize(
    ("fields", "param"), [({"stream": True}, "stream"), ({"n": 2}, "n")], ids=["stream", "n"]
)
def test_what_a_prefill_cannot_do_is_refused(
    pair: tuple[Server, Server], fields: dict[str, Any], param: str
) -> None:
    asked = {"kv_transfer_params": {"do_remote_decode": True}, **fields}
    answer = ask(pair[0], CASES["no picture"], **asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_roles_refuse_what_is_the_others(pair: tuple[Server, Server], aggregated: Server) -> None:
    for server in (pair[1], aggregated):
        assert "hands no KV on" in ask_prefill(server, CASES["no picture"]).text
    params = handed_on(ask_prefill(pair[0], CASES["no picture"]))
    for server in (pair[0], aggregated):
        answer = ask(server, CASES["no picture"], kv_transfer_params=params)
        assert answer.status_code == 400
        assert "takes no KV over" in answer.text
    assert ask(pair[1], CASES["no picture"], kv_transfer_params=params).status_code == 200
    raw = ask(pair[1], CASES["one picture"], kv_transfer_params=params)
    assert raw.json()["error"]["code"] == "no_encoder"


def test_a_decode_instance_serves_text_from_the_first_token(
    pair: tuple[Server, Server], folder: Path, reference: Reference
) -> None:
    messages = CASES["no picture"]
    other = engine("decode-alone", folder, extra=kv_flags("kv_consumer", folder / "alone"))
    with running(other):
        assert_same_tokens(ids(ask(other, messages, return_token_ids=True)), reference.generate(messages, 12))
        assert other.metric("epd_engine_model_parameters") == pair[1].metric("epd_engine_model_parameters")


def test_kv_of_another_prompt_or_tenant_is_a_miss(
    pair: tuple[Server, Server], encoder: Server, area: Path
) -> None:
    """Same length, other words, picture or tenant: the wrong KV must be neither used nor learned."""
    messages = for_language(encoder, [user(SEVEN, "What digit is this?")])
    others = [
        (for_language(encoder, [user(THREE, "What digit is this?")]), {}),
        (messages, {"cache_salt": "another"}),
    ]
    for other, fields in others:
        params = handed_on(ask_prefill(pair[0], messages, cache_salt="mine"))
        answer = ask(pair[1], other, kv_transfer_params=params, **{"cache_salt": "mine", **fields})
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "kv_miss"
    eventually(lambda: transfers_in(area) == [])
