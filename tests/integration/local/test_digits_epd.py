"""Encoder, prefill and decode as `epd up` runs them: the shipped example with the real engine and proxy."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.engine.test_parity import CASES, noise
from tests.integration.local.epd_runner import until
from tests.integration.local.three_roles import EXAMPLE, Running, deployed, events, ids
from tests.support.digits import Reference, assert_same_tokens, user


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with deployed(tmp_path_factory.mktemp("state"), EXAMPLE) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers(running: Running, reference: Reference, name: str) -> None:
    wanted = reference.generate(CASES[name], 12)
    answer = running.ask(CASES[name])
    assert_same_tokens(ids(answer), wanted)
    assert answer.json()["usage"]["prompt_tokens"] == len(wanted.prompt_ids)
    assert "kv_transfer_params" not in answer.json()


def test_sixteen_mixed_requests_at_once(running: Running, reference: Reference) -> None:
    mixed = [*CASES.values()][:8]
    mixed += [[user(noise(21 + 12 * i, 118 - 7 * i, 50 + i), "What digit is this?")] for i in range(8)]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(running.ask, mixed))
    for messages, answer in zip(mixed, answers, strict=True):
        assert_same_tokens(ids(answer), reference.generate(messages, 12))


def test_a_stream_says_the_same_and_has_the_first_token_once(running: Running) -> None:
    whole = running.ask(CASES["two pictures"]).json()
    said = events(running.ask(CASES["two pictures"], stream=True, stream_options={"include_usage": True}))
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in said if one["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    assert said[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("tokens", [1, 2])
def test_an_answer_of_a_token_or_two_is_cut_where_it_is_meant_to_be(running: Running, tokens: int) -> None:
    whole = ids(running.ask(CASES["two pictures"]))
    answer = running.ask(CASES["two pictures"], max_tokens=tokens)
    assert ids(answer) == whole[:tokens]
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_decode_computes_no_prompt_and_encodes_nothing(running: Running) -> None:
    loads = running.metric("decode", "epd_engine_kv_loads_total")
    ids(running.ask(CASES["several turns"]))
    assert running.metric("decode", "epd_engine_kv_loads_total") == loads + 1
    for name in ("prompt_tokens", "encoder_items", "kv_load_failures"):
        assert running.metric("decode", f"epd_engine_{name}_total") == 0
    for role in ("prefill", "decode"):
        assert running.metric(role, "epd_engine_kv_cache_usage_ratio") == 0
    assert running.metric("prefill", "epd_engine_encoder_items_total") == 0


def test_the_files_of_kv_are_gone_once_they_were_taken(running: Running) -> None:
    kv = Path(running.state["store"], "kv")
    ids(running.ask(CASES["one picture"]))
    assert kv.is_dir()
    until(lambda: not list(kv.rglob("*.safetensors")), "no file is left")


def test_a_client_that_leaves_frees_both_sides(running: Running) -> None:
    body = running.body(CASES["one picture"], stream=True, max_tokens=7000, ignore_eos=True)
    with httpx.stream("POST", running.url, json=body, timeout=120) as answer:
        next(answer.iter_bytes())
    for role in ("prefill", "decode"):
        until(lambda role=role: running.metric(role, "epd_engine_kv_cache_usage_ratio") == 0, "free blocks")


def test_kv_that_is_gone_is_made_again(running: Running, reference: Reference) -> None:
    before = running.reprefills()
    with running.between_prefill_and_decode(CASES["two pictures"]) as asked:
        for transfer in Path(running.state["store"], "kv").glob("*/*"):
            shutil.rmtree(transfer)
    assert_same_tokens(ids(asked.result()), reference.generate(CASES["two pictures"], 12))
    assert running.reprefills() == before + 1


def test_prefill_killed_once_its_kv_is_in_files_is_missed_by_nobody(
    running: Running, reference: Reference
) -> None:
    before, process = running.reprefills(), running.process("prefill")
    with running.between_prefill_and_decode(CASES["two pictures"]) as asked:
        os.kill(process["pid"], signal.SIGKILL)
    assert_same_tokens(ids(asked.result()), reference.generate(CASES["two pictures"], 12))
    assert running.reprefills() == before
    running.until_back("prefill", process["restarts"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_was_killed_comes_back_and_answers(running: Running, reference: Reference, role: str) -> None:
    running.kill(role)
    assert_same_tokens(ids(running.ask(CASES["one picture"])), reference.generate(CASES["one picture"], 12))


def test_decode_killed_in_the_middle_ends_the_stream_in_an_error_event(running: Running) -> None:
    body = running.body(CASES["one picture"], stream=True, max_tokens=7000, ignore_eos=True)
    pid = running.process("decode")["pid"]
    with httpx.stream("POST", running.url, json=body, timeout=120) as answer:
        pieces = answer.iter_bytes()
        said = next(pieces)
        os.kill(pid, signal.SIGKILL)
        said += b"".join(pieces)
    last = said.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"
    until(lambda: running.metric("prefill", "epd_engine_kv_cache_usage_ratio") == 0, "free blocks")
