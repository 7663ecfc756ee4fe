"""`kvTransfer.type: nixl` under `epd up`: two of prefill and decode each, and what they survive."""

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.integration.engine.test_parity import CASES
from tests.integration.local.epd_runner import until
from tests.integration.local.three_roles import EXAMPLE, Running, deployed, events, ids
from tests.support.digits import Reference, assert_same_tokens

PREFILLS = [("prefill", 0), ("prefill", 1)]
DECODES = [("decode", 0), ("decode", 1)]
ENGINES = PREFILLS + DECODES
LEASE, PATIENCE = 6.0, 3.0  # enough for a slow machine to begin, and to come to an end
SEATS = 4  # of a decode instance; as many may wait

QUESTION = CASES["two pictures"]


def document() -> dict[str, Any]:
    """The shipped example, by memory, with two of each."""
    made: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = made["spec"]
    spec["model"]["source"] = str((EXAMPLE.parent / spec["model"]["source"]).resolve())
    extra = {"lease_seconds": LEASE, "pull_seconds": PATIENCE}
    spec["kvTransfer"] = {"type": "nixl", "extraConfig": extra}
    spec["roles"]["prefill"]["replicas"] = 2
    seats = ["--max-num-seqs", str(SEATS), "--max-waiting", str(SEATS)]
    spec["roles"]["decode"] = {"replicas": 2, "extraArgs": seats}
    return made


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("nixl")
    path = folder / "digits-nixl.yaml"
    path.write_text(yaml.safe_dump(document()))
    with deployed(tmp_path_factory.mktemp("state"), path) as made:
        yield made


@pytest.fixture
def running(deployment: Running) -> Iterator[Running]:
    """Afterwards all serve, nothing is held by anybody, and no decode instance has computed a prompt."""
    yield deployment
    deployment.until_all_ready()
    for role, index in ENGINES:
        for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
            assert_becomes(deployment, 0, role, name, index)
        assert deployment.metric(role, "epd_engine_integrity_problems", index) == 0
    for role, index in DECODES:
        for name in ("prompt_tokens", "encoder_items", "ec_loads"):
            assert deployment.metric(role, f"epd_engine_{name}_total", index) == 0


def assert_becomes(running: Running, value: float, role: str, name: str, index: int) -> None:
    until(lambda: running.metric(role, f"epd_engine_{name}", index) == value, f"{name} of {role}-{index}")


def counts(running: Running, name: str) -> dict[tuple[str, int], float]:
    """A counter of each engine."""
    found = {(r, i): running.metric(r, f"epd_engine_{name}_total", i) for r, i in ENGINES}
    return {key: value for key, value in found.items() if value}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def assert_right(answer: httpx.Response, reference: Reference, name: str = "two pictures") -> None:
    assert_same_tokens(ids(answer), reference.generate(CASES[name], 12))


def test_every_answer_is_right_whoever_gives_it(running: Running, reference: Reference) -> None:
    """All cases at once, so that all four instances have to do with them."""
    with ThreadPoolExecutor(SEATS) as pool:
        for name, answer in zip(CASES, pool.map(running.ask, CASES.values()), strict=True):
            assert_right(answer, reference, name)
            assert "kv_transfer_params" not in answer.json()
    saves, loads = counts(running, "kv_saves"), counts(running, "kv_loads")
    assert saves.keys() == set(PREFILLS)
    assert loads.keys() == set(DECODES)
    assert sum(saves.values()) == sum(loads.values()) == len(CASES)
    assert counts(running, "kv_save_failures") == counts(running, "kv_load_failures") == {}


def test_a_stream_says_the_same_and_has_the_first_token_once(running: Running) -> None:
    whole = running.ask(QUESTION).json()
    said = events(running.ask(QUESTION, stream=True, stream_options={"include_usage": True}))
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in said if one["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert said[-1]["usage"][name] == whole["usage"][name]


def test_prefill_and_decode_are_chosen_independently(running: Running, reference: Reference) -> None:
    """Each by its own load: a decode instance takes from both, and a prefill instance gives to both."""
    saves, loads = counts(running, "kv_saves"), counts(running, "kv_loads")
    body = running.body(QUESTION, stream=True, max_tokens=7000, ignore_eos=True)
    with httpx.stream("POST", running.url, json=body, timeout=120) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces)  # from 0 to 0, which is busy now
        assert_right(running.ask(QUESTION), reference)  # from 0 to 1
        running.signal("prefill", signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                held = pool.submit(running.ask, QUESTION)
                until(lambda: running.outstanding("prefill") == 1, "a call to prefill")
                assert_right(running.ask(QUESTION), reference)  # from 1 to 1
                running.signal("prefill", signal.SIGCONT)
                assert_right(held.result(), reference)  # from 0 to 1
        finally:
            running.signal("prefill", signal.SIGCONT)
    assert counts(running, "kv_saves") == {
        PREFILLS[0]: saves[PREFILLS[0]] + 3,
        PREFILLS[1]: saves[PREFILLS[1]] + 1,
    }
    assert counts(running, "kv_loads") == {
        DECODES[0]: loads[DECODES[0]] + 1,
        DECODES[1]: loads[DECODES[1]] + 3,
    }


def test_clients_that_leave_free_both_sides(running: Running) -> None:
    """In the middle of an answer, and before decode has come for the KV."""
    body = running.body(QUESTION, stream=True, max_tokens=7000, ignore_eos=True)
    with httpx.stream("POST", running.url, json=body, timeout=120) as answer:
        next(answer.iter_bytes())
    running.signal("decode", signal.SIGSTOP)
    try:
        with asked(running.url, body):
            until(lambda: running.outstanding("decode") == 1, "a call to decode")
            assert running.metric("prefill", "epd_engine_kv_cache_usage_ratio") > 0
        until(lambda: running.outstanding("decode") == 0, "the proxy has let go")
    finally:
        running.signal("decode", signal.SIGCONT)


def test_a_full_decode_instance_is_429_and_another_takes_the_same_kv(
    running: Running, reference: Reference
) -> None:
    """With all of them full the client is told so, and prefill frees at the end of the lease."""
    loads, reprefills = counts(running, "kv_loads"), running.reprefills()
    failures = running.metric("prefill", "epd_engine_kv_save_failures_total")
    with ExitStack() as busy:
        fill(running, 0, busy)
        taken = running.metric("decode", "epd_engine_kv_loads_total")
        assert_right(running.ask(QUESTION), reference)
        assert counts(running, "kv_loads") == {DECODES[0]: taken, DECODES[1]: loads[DECODES[1]] + 1}
        fill(running, 1, busy)
        refused = running.ask(QUESTION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        assert running.metric("prefill", "epd_engine_kv_cache_usage_ratio") > 0
    assert running.reprefills() == reprefills
    assert_becomes(running, failures + 1, "prefill", "kv_save_failures_total", 0)


def test_prefills_that_are_killed_before_or_in_the_pull(running: Running, reference: Reference) -> None:
    """The handover is done once more by another one, at once; without another it is 503 before any byte."""
    before = running.reprefills()
    with in_the_pull(running) as answer:
        running.signal("prefill", signal.SIGKILL)
    assert_right(answer.result(), reference)
    assert "prefill broke off" in running.log("decode")
    with running.between_prefill_and_decode(QUESTION, decodes=2, stream=True) as answer:
        running.signal("prefill", signal.SIGKILL, 1)
    refused = answer.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_prefill_available")
    assert refused.headers["retry-after"]
    assert "prefill cannot be reached" in running.log("decode")
    assert running.reprefills() == before + 2


def test_prefill_that_stands_still_in_the_pull_is_left_when_its_time_is_up(
    running: Running, reference: Reference
) -> None:
    """It frees the KV at the end of the lease."""
    before = running.reprefills()
    failures = running.metric("prefill", "epd_engine_kv_save_failures_total")
    try:
        with in_the_pull(running) as answer:
            pass
        assert_right(answer.result(), reference)
        assert "prefill did not answer in time" in running.log("decode")
    finally:
        running.signal("prefill", signal.SIGCONT)
    assert running.reprefills() == before + 1
    assert_becomes(running, failures + 1, "prefill", "kv_save_failures_total", 0)


@contextmanager
def in_the_pull(running: Running) -> Iterator[Future[httpx.Response]]:
    """A question whose decode has come for the KV, and waits for a prefill that is stopped."""
    prefill, decode = (running.process(role)["pid"] for role in ("prefill", "decode"))
    with running.between_prefill_and_decode(QUESTION) as answer:
        running.signal("prefill", signal.SIGSTOP)
        running.signal("decode", signal.SIGCONT)
        until(lambda: are_connected(prefill, decode), "decode has come for the KV")
        yield answer


def are_connected(prefill: int, decode: int) -> bool:
    """Whether the second process has a connection to a port at which the first one listens."""
    listens = {c.laddr.port for c in psutil.Process(prefill).net_connections() if c.status == "LISTEN"}
    return any(c.raddr and c.raddr.port in listens for c in psutil.Process(decode).net_connections())


def test_decodes_that_are_killed_before_or_after_the_pull(running: Running, reference: Reference) -> None:
    """Before: another one, with new KV, while the first is freed at the end of its lease. After, in the
    middle of a stream: an error event."""
    failures = running.metric("prefill", "epd_engine_kv_save_failures_total")
    with running.between_prefill_and_decode(QUESTION) as answer:
        running.signal("decode", signal.SIGKILL)
    assert_right(answer.result(), reference)
    body = running.body(QUESTION, stream=True, max_tokens=7000, ignore_eos=True)
    with httpx.stream("POST", running.url, json=body, timeout=120) as streamed:
        pieces = streamed.iter_bytes()
        said = next(pieces)
        running.signal("decode", signal.SIGKILL, 1)
        said += b"".join(pieces)
    last = said.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_disconnected"
    assert_becomes(running, failures + 1, "prefill", "kv_save_failures_total", 0)


@contextmanager
def asked(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A request of a client that waits for its answer as long as the context lasts, and then leaves."""
    port, content = httpx.URL(url).port, json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        yield


def fill(running: Running, index: int, busy: ExitStack) -> None:
    """All places of a decode instance are taken until `busy` is left, by what the other prefill made."""
    prefill, decode = (
        f"{running.engine(role, i)}/v1/chat/completions" for role, i in (("prefill", 1), ("decode", index))
    )
    body = running.body(CASES["no picture"])
    first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    for _ in range(2 * SEATS):
        params = httpx.post(prefill, json=first, timeout=120).json()["kv_transfer_params"]
        long = {**body, "max_tokens": 7000, "ignore_eos": True, "kv_transfer_params": params}
        busy.enter_context(asked(decode, long))
    assert_becomes(running, SEATS, "decode", "requests_running", index)
    assert_becomes(running, SEATS, "decode", "requests_waiting", index)
