"""KV by memory, when prefill or decode dies, stands still or has no room: nothing leaks on either side."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.engine.test_prefill_decode_faults import LIMITS, assert_at_rest, picture
from tests.support.digits import Reference, assert_same_tokens
from tests.support.engines import MODEL_NAME, engine
from tests.support.epd_client import ask, ids
from tests.support.kv_client import ask_prefill, ask_split, for_language, handed_on, nixl_flags
from tests.support.processes import Server, running
from tests.support.waiting import eventually

LEASE, PATIENCE = 8.0, 4.0  # enough for a slow machine to begin, and to come to an end
IDLE_SECONDS, IDLE_SHARE = 5.0, 0.02


def prefill_in(folder: Path, store: Path, name: str) -> Server:
    flags = LIMITS + nixl_flags("kv_producer", lease_seconds=LEASE, pull_seconds=PATIENCE)
    return engine(name, folder, role="ec_consumer", store=store, extra=flags)


def decode_in(folder: Path, name: str) -> Server:
    """With hardly more KV than one request may need."""
    flags = [*LIMITS, "--kv-cache-tokens", "512", *nixl_flags("kv_consumer", pull_seconds=PATIENCE)]
    return engine(name, folder, extra=flags)


@pytest.fixture(scope="module")
def pair(folder: Path, store: Path) -> Iterator[tuple[Server, Server]]:
    made = prefill_in(folder, store, "prefill-x"), decode_in(folder, "decode-x")
    with running(*made):
        yield made


@pytest.fixture
def prefill(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture
def decode(pair: tuple[Server, Server]) -> Server:
    return pair[1]


def assert_missed(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "kv_miss"
    assert answer.headers["retry-after"]


def assert_serves(encoder: Server, prefill: Server, decode: Server, reference: Reference, seed: int) -> None:
    messages = picture(seed)
    answer = ask_split(encoder, prefill, decode, messages, return_token_ids=True)
    assert_same_tokens(ids(answer), reference.generate(messages, 12))


def test_prefill_killed_after_its_answer(
    encoder: Server, decode: Server, store: Path, folder: Path, reference: Reference, prefill: Server
) -> None:
    """A plain 503 even of a stream, and another prefill serves."""
    asked = for_language(encoder, picture(1))
    with running(mortal := prefill_in(folder, store, "prefill-y")):
        assert_serves(encoder, mortal, decode, reference, 2)
        params = handed_on(ask_prefill(mortal, asked))
        mortal.kill()
        assert_missed(ask(decode, asked, stream=True, kv_transfer_params=params))
    assert_serves(encoder, prefill, decode, reference, 1)
    assert_at_rest(prefill, decode)


def test_prefill_that_stands_still_costs_its_own_requests(
    encoder: Server, prefill: Server, decode: Server, reference: Reference
) -> None:
    asked = for_language(encoder, picture(3))
    params = handed_on(ask_prefill(prefill, asked))
    prefill.signal(signal.SIGSTOP)
    try:
        assert_missed(ask(decode, asked, kv_transfer_params=params))
    finally:
        prefill.signal(signal.SIGCONT)
    assert_at_rest(prefill, decode)
    assert_serves(encoder, prefill, decode, reference, 3)


def test_prefill_killed_while_its_memory_is_read(
    encoder: Server, decode: Server, store: Path, folder: Path, reference: Reference
) -> None:
    """It is a miss before the time is up, whether decode has read from it before or is about to connect."""
    known, unknown = (prefill_in(folder, store, f"prefill-{name}") for name in ("known", "unknown"))
    with running(known, unknown):
        assert_serves(encoder, known, decode, reference, 11)
        asked, before = for_language(encoder, picture(12)), len(decode.log.read_text())
        for mortal in (known, unknown):
            params = handed_on(ask_prefill(mortal, asked))
            with relayed(params["connector"], mortal.kill) as connector:
                assert_missed(ask(decode, asked, kv_transfer_params={**params, "connector": connector}))
    said = decode.log.read_text()[before:]
    assert said.count("KV cannot be pulled") == 2
    assert "in time" not in said
    assert_at_rest(decode)


@contextlib.contextmanager
def relayed(connector: dict[str, Any], before_answer: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Stands between decode and prefill's side channel for one pull; the function is called once prefill has
    said where its blocks lie, and decode does not know it yet."""

    def relay() -> None:
        decode, _ = listener.accept()
        with decode, socket.create_connection((connector["host"], connector["port"])) as prefill:
            prefill.sendall(received(decode))
            answer = received(prefill)
            before_answer()
            decode.sendall(answer)
            with contextlib.suppress(ConnectionResetError):
                prefill.recv(1)  # so that the one connection ends with the other

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(relay)
        yield {**connector, "host": "127.0.0.1", "port": listener.getsockname()[1]}
        done.result()


def received(peer: socket.socket) -> bytes:
    """A whole frame."""
    said = b""
    while len(said) < 4 or len(said) < 4 + int.from_bytes(said[:4]):
        part = peer.recv(1 << 20)
        assert part, "the connection has ended"
        said += part
    return said


def test_blocks_that_nobody_pulls_are_free_at_the_end_of_their_lease(
    encoder: Server, prefill: Server, decode: Server
) -> None:
    asked = for_language(encoder, picture(4))
    failures = prefill.metric("epd_engine_kv_save_failures_total")
    params = handed_on(ask_prefill(prefill, asked))
    assert prefill.metric("epd_engine_kv_cache_usage_ratio") > 0
    assert_at_rest(prefill)
    assert prefill.metric("epd_engine_kv_save_failures_total") == failures + 1
    assert_missed(ask(decode, asked, kv_transfer_params=params))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_that_dies_or_stands_still_in_the_middle_of_a_pull(
    encoder: Server, prefill: Server, folder: Path, reference: Reference, fate: signal.Signals
) -> None:
    """Prefill is held, so that decode is in the middle for sure; the blocks are free in the end."""
    asked = for_language(encoder, picture(5))
    with running(decode := decode_in(folder, f"decode-{fate.name}")), ThreadPoolExecutor(1) as pool:
        port = handed_on(ask_prefill(prefill, asked))["connector"]["port"]
        params = handed_on(ask_prefill(prefill, asked))
        prefill.signal(signal.SIGSTOP)
        try:
            answer = pool.submit(ask, decode, asked, kv_transfer_params=params)
            process = psutil.Process(decode.pid)
            eventually(lambda: any(c.raddr and c.raddr.port == port for c in process.net_connections()))
            decode.signal(fate)
        finally:
            prefill.signal(signal.SIGCONT)
        assert_at_rest(prefill)
        if fate is signal.SIGSTOP:
            decode.signal(signal.SIGCONT)
            assert_missed(answer.result())
            assert_serves(encoder, prefill, decode, reference, 6)
            assert_at_rest(decode)
        else:
            with pytest.raises(httpx.TransportError):
                answer.result()


def test_decode_killed_in_the_middle_of_an_answer(encoder: Server, prefill: Server, folder: Path) -> None:
    asked = for_language(encoder, picture(7))
    with running(decode := decode_in(folder, "decode-y")):
        params = handed_on(ask_prefill(prefill, asked))
        body = {"model": MODEL_NAME, "messages": asked, "max_tokens": 300, "ignore_eos": True, "stream": True}
        body |= {"kv_transfer_params": params}
        with httpx.stream("POST", f"{decode.url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            decode.kill()
            with contextlib.suppress(httpx.TransportError):
                list(lines)
    assert_at_rest(prefill)


def test_clients_that_go_away_free_both_sides(encoder: Server, prefill: Server, decode: Server) -> None:
    asked = for_language(encoder, picture(8))
    for patience in (0.001, 0.005, 0.02, 0.05):
        body = {"model": MODEL_NAME, "messages": asked, "kv_transfer_params": {"do_remote_decode": True}}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{prefill.url}/v1/chat/completions", json=body, timeout=patience)
        params = handed_on(ask_prefill(prefill, asked))
        body |= {"kv_transfer_params": params, "max_tokens": 300, "ignore_eos": True}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{decode.url}/v1/chat/completions", json=body, timeout=patience)
    assert_at_rest(prefill, decode)


def test_an_answer_of_one_token_frees_the_blocks_that_it_does_not_need(
    encoder: Server, prefill: Server, decode: Server
) -> None:
    asked = for_language(encoder, picture(9))
    loads = decode.metric("epd_engine_kv_loads_total")
    params = handed_on(ask_prefill(prefill, asked))
    assert ask(decode, asked, kv_transfer_params=params, max_tokens=1).status_code == 200
    eventually(lambda: prefill.metric("epd_engine_kv_cache_usage_ratio") == 0)
    assert decode.metric("epd_engine_kv_loads_total") == loads
    assert "its request ended before" in prefill.log.read_text()
    assert_at_rest(prefill, decode)


def test_requests_that_are_preempted_go_on_from_a_copy(
    encoder: Server, prefill: Server, decode: Server, aggregated: Server
) -> None:
    """Prefill keeps their blocks no longer, and decode could not compute them."""
    prompts = [picture(30 + n) for n in range(6)]
    fields = {"max_tokens": 150, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda m: ask_split(encoder, prefill, decode, m, **fields), prompts))
    assert "preempted for lack of KV blocks" in decode.log.read_text()
    assert decode.metric("epd_engine_prompt_tokens_total") == 0
    for messages, answer in zip(prompts, answers, strict=True):
        assert ids(answer) == ids(ask(aggregated, messages, **fields))
    assert_at_rest(prefill, decode)


def test_nobody_burns_a_core_at_rest(
    prefill: Server, decode: Server, encoder: Server, reference: Reference
) -> None:
    """After a transfer as before one: no thread spins for what may come."""
    assert_serves(encoder, prefill, decode, reference, 10)
    processes = [psutil.Process(server.pid) for server in (prefill, decode)]
    used = [sum(p.cpu_times()[:2]) for p in processes]
    time.sleep(IDLE_SECONDS)
    for process, before in zip(processes, used, strict=True):
        assert (sum(process.cpu_times()[:2]) - before) / IDLE_SECONDS < IDLE_SHARE


def test_many_at_once_while_others_go_away(
    encoder: Server, prefill: Server, decode: Server, reference: Reference
) -> None:
    prompts = [picture(40 + n) for n in range(8)]
    stop = threading.Event()

    def come_and_go() -> None:
        asked = for_language(encoder, picture(60))
        while not stop.is_set():
            params = handed_on(ask_prefill(prefill, asked))
            body = {"model": MODEL_NAME, "messages": asked, "kv_transfer_params": params}
            with contextlib.suppress(httpx.TimeoutException):
                httpx.post(f"{decode.url}/v1/chat/completions", json=body, timeout=0.01)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda m: ask_split(encoder, prefill, decode, m, return_token_ids=True), prompts)
            )
    finally:
        stop.set()
        thread.join()
    for messages, answer in zip(prompts, answers, strict=True):
        assert_same_tokens(ids(answer), reference.generate(messages, 12))
    assert_at_rest(prefill, decode)
