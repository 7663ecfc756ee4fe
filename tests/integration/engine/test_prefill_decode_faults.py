"""Prefill and decode instances that die, stop, lie or have no room: a fault costs its own requests only."""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.engine.test_parity import CASES, noise
from tests.support.digits import Reference, assert_same_tokens, user
from tests.support.engines import MODEL_NAME, engine
from tests.support.epd_client import ask, ids
from tests.support.kv_client import (
    Messages,
    ask_prefill,
    ask_split,
    for_language,
    handed_on,
    kv_flags,
    transfers_in,
)
from tests.support.mounts import small_tmpfs
from tests.support.processes import Server, running
from tests.support.waiting import eventually

LIMITS = ["--max-model-len", "512", "--limit-mm-per-prompt", '{"image": 4}']
LEASE = 5.0  # enough for a slow machine to begin a load


@pytest.fixture(scope="module")
def area(folder: Path) -> Path:
    return folder / "kv-faults"


def prefill_in(folder: Path, store: Path, area: Path, name: str, **extra: float) -> Server:
    flags = LIMITS + kv_flags("kv_producer", area, **{"lease_seconds": LEASE, **extra})
    return engine(name, folder, role="ec_consumer", store=store, extra=flags)


def decode_in(folder: Path, area: Path, name: str) -> Server:
    """With hardly more KV than one request may need."""
    flags = [*LIMITS, "--kv-cache-tokens", "512", *kv_flags("kv_consumer", area)]
    return engine(name, folder, extra=flags)


@pytest.fixture(scope="module")
def pair(folder: Path, store: Path, area: Path) -> Iterator[tuple[Server, Server]]:
    made = prefill_in(folder, store, area, "prefill-f"), decode_in(folder, area, "decode-f")
    with running(*made):
        yield made


@pytest.fixture
def prefill(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture
def decode(pair: tuple[Server, Server]) -> Server:
    return pair[1]


@pytest.fixture
def mortal_prefill(folder: Path, store: Path, area: Path) -> Iterator[Server]:
    with running(server := prefill_in(folder, store, area, "prefill-m")):
        yield server


def picture(seed: int) -> Messages:
    return [user(noise(90, 80 + seed, seed), "What digit is this?")]


def assert_at_rest(*servers: Server) -> None:
    for server in servers:
        eventually(lambda s=server: s.metric("epd_engine_requests_running") == 0)  # type: ignore[misc]
        eventually(lambda s=server: s.metric("epd_engine_requests_waiting") == 0)  # type: ignore[misc]
        eventually(lambda s=server: s.metric("epd_engine_kv_cache_usage_ratio") == 0)  # type: ignore[misc]
        time.sleep(1.2)  # one look at the books at rest
        assert server.metric("epd_engine_integrity_problems") == 0, server.log.read_text()[-2000:]


def test_prefill_killed_after_its_answer(
    encoder: Server, mortal_prefill: Server, decode: Server, area: Path, reference: Reference
) -> None:
    """The files are there without it; where they are not, it is a plain 503 even of a stream."""
    messages = picture(1)
    asked = for_language(encoder, messages)
    params = [handed_on(ask_prefill(mortal_prefill, asked)) for _ in range(2)]
    mortal_prefill.kill()
    answer = ask(decode, asked, return_token_ids=True, kv_transfer_params=params[0])
    assert_same_tokens(ids(answer), reference.generate(messages, 12))
    eventually(lambda: [p.name for p in transfers_in(area)] == [params[1]["remote_request_id"]])
    shutil.rmtree(transfers_in(area)[0])
    other = CASES["no picture"]
    assert ask(decode, other, kv_transfer_params=params[1]).status_code == 409, "another length"
    # Another tenant's prefix cache does not stand in for the files.
    missed = ask(decode, asked, stream=True, kv_transfer_params=params[1], cache_salt="x")
    assert missed.status_code == 503
    assert missed.json()["error"]["code"] == "kv_miss"
    assert missed.headers["retry-after"]
    assert_at_rest(decode)


def test_prefill_killed_at_work_leaves_nothing_that_its_successor_does_not_sweep(
    encoder: Server, mortal_prefill: Server, area: Path, store: Path, folder: Path
) -> None:
    asked = [for_language(encoder, picture(n)) for n in range(10, 14)]

    def keep_asking(messages: Messages) -> None:
        with contextlib.suppress(httpx.TransportError):
            while True:
                ask_prefill(mortal_prefill, messages, cache_salt=os.urandom(4).hex())

    threads = [threading.Thread(target=keep_asking, args=(messages,)) for messages in asked]
    for thread in threads:
        thread.start()
    eventually(lambda: len(transfers_in(area)) > 5)
    mortal_prefill.kill()
    for thread in threads:
        thread.join()
    assert transfers_in(area)
    with running(prefill_in(folder, store, area, "prefill-g", lease_seconds=0.5, orphan_seconds=0.5)):
        eventually(lambda: transfers_in(area) == [])


def test_a_transfer_that_nobody_pulls_goes_at_the_end_of_its_lease(
    encoder: Server, prefill: Server, decode: Server, area: Path
) -> None:
    asked = for_language(encoder, picture(20))
    params = handed_on(ask_prefill(prefill, asked))
    decode.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, decode, asked, kv_transfer_params=params)
        eventually(lambda: transfers_in(area) == [])
        decode.signal(signal.SIGCONT)
        answer = late.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kv_miss")
    assert_at_rest(prefill, decode)


def test_prefill_that_stands_still_keeps_nobody_from_its_kv(
    encoder: Server, prefill: Server, decode: Server, area: Path, reference: Reference
) -> None:
    messages = picture(21)
    asked = for_language(encoder, messages)
    params = handed_on(ask_prefill(prefill, asked))
    prefill.signal(signal.SIGSTOP)
    answer = ask(decode, asked, return_token_ids=True, kv_transfer_params=params)
    prefill.signal(signal.SIGCONT)
    assert_same_tokens(ids(answer), reference.generate(messages, 12))
    eventually(lambda: transfers_in(area) == [])
    assert_at_rest(prefill, decode)


def test_decode_killed_in_the_middle_of_an_answer(
    encoder: Server, prefill: Server, area: Path, folder: Path, reference: Reference
) -> None:
    """Its stream breaks; another decode instance can go on from the same files."""
    messages = picture(22)
    asked = for_language(encoder, messages)
    decode, other = (decode_in(folder, area, name) for name in ("decode-m", "decode-n"))
    fields = {"max_tokens": 300, "ignore_eos": True, "stream": True}
    with running(decode, other):
        params = handed_on(ask_prefill(prefill, asked))
        body = {"model": MODEL_NAME, "messages": asked, **fields, "kv_transfer_params": params}
        with httpx.stream("POST", f"{decode.url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            decode.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        again = ask(other, asked, return_token_ids=True, kv_transfer_params=params)
        assert_same_tokens(ids(again), reference.generate(messages, 12))
        eventually(lambda: transfers_in(area) == [])


def test_clients_that_go_away_free_both_sides(
    encoder: Server, prefill: Server, decode: Server, area: Path
) -> None:
    asked = for_language(encoder, picture(23))
    for patience in (0.001, 0.005, 0.02, 0.05):
        body = {"model": MODEL_NAME, "messages": asked, "kv_transfer_params": {"do_remote_decode": True}}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{prefill.url}/v1/chat/completions", json=body, timeout=patience)
        params = handed_on(ask_prefill(prefill, asked))
        body |= {"kv_transfer_params": params, "max_tokens": 300, "ignore_eos": True}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{decode.url}/v1/chat/completions", json=body, timeout=patience)
    eventually(lambda: transfers_in(area) == [])
    assert_at_rest(prefill, decode)


def test_requests_that_are_preempted_load_their_prompts_again(
    encoder: Server, prefill: Server, decode: Server, area: Path, aggregated: Server
) -> None:
    """D has no tower and no EC store: it could not compute them."""
    prompts = [picture(30 + n) for n in range(6)]
    fields = {"max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda m: ask_split(encoder, prefill, decode, m, **fields), prompts))
    assert "preempted for lack of KV blocks" in decode.log.read_text()
    assert decode.metric("epd_engine_kv_loads_total") > len(prompts)
    assert decode.metric("epd_engine_prompt_tokens_total") == 0
    for messages, answer in zip(prompts, answers, strict=True):
        assert ids(answer) == ids(ask(aggregated, messages, **fields))
    eventually(lambda: transfers_in(area) == [])
    assert_at_rest(decode)


def test_another_dtype_is_refused_with_both(prefill: Server, area: Path, folder: Path) -> None:
    flags = [*LIMITS, "--dtype", "bfloat16", *kv_flags("kv_consumer", area)]
    other = engine("decode-bf16", folder, extra=flags)
    params = handed_on(ask_prefill(prefill, CASES["no picture"]))
    with running(other):
        answer = ask(other, CASES["no picture"], kv_transfer_params=params)
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "kv_incompatible"
    assert "dtype is 'float32' there and 'bfloat16' here" in answer.text


def test_a_full_volume_is_told_and_survived(
    encoder: Server, decode: Server, store: Path, folder: Path
) -> None:
    with small_tmpfs(folder / "kv-small", 96 << 10) as small:
        server = prefill_in(folder, store, small, "prefill-small")
        with running(server):
            long = [{"role": "user", "content": "digit " * 60}]
            answer = ask_prefill(server, long)
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "kv_store_unavailable"
            assert "No space left" in answer.text
            eventually(lambda: transfers_in(small) == [])
            handed_on(ask_prefill(server, CASES["no picture"]))
            assert_at_rest(server)


def test_an_unusable_config_ends_the_process_with_the_reason(folder: Path) -> None:
    config = {"kv_connector": "NixlKVConnector", "kv_role": "kv_both", "kv_ip": "192.0.2.1"}
    server = engine("nobody", folder, extra=["--kv-transfer-config", json.dumps(config)])
    server.start()
    assert server.wait() == 1
    assert "kv_ip 192.0.2.1, kv_port 0: " in server.log.read_text()
