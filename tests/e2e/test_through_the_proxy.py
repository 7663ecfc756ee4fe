"""A client's view of a whole deployment: one address, right answers, and what it survives."""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from PIL import Image

from tests.e2e.conftest import Deployment
from tests.integration.engine.test_parity import CASES, noise
from tests.integration.engine.test_store_faults import DAMAGES
from tests.support.digits import Reference, assert_same_tokens, shipped, user
from tests.support.engines import MODEL_NAME
from tests.support.epd_client import ask, ids, text
from tests.support.processes import Server
from tests.support.waiting import eventually

Messages = list[dict[str, Any]]
LARGE = (112, 112)  # 16 embeddings: all that a PD's encoder cache holds here


def question(angle: float, name: str = "seven") -> Messages:
    return [user(shipped(name).resize(LARGE).rotate(angle), "What digit is this?")]


@pytest.fixture(autouse=True)
def _all_up(deployment: Deployment) -> Iterator[None]:
    """Whatever a test killed or stopped is back for the next one."""
    yield
    for server in (*deployment.encoders, *deployment.pds):
        if server.exit_code is not None:
            server.start()
        else:
            server.signal(signal.SIGCONT)
        server.wait_ready()

    def all_ready() -> bool:
        roles = httpx.get(f"{deployment.proxy.url}/ready").json()
        return '"down"' not in json.dumps(roles) and "false" not in json.dumps(roles).lower()

    eventually(all_ready)


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers(deployment: Deployment, reference: Reference, name: str) -> None:
    answer = ask(deployment.proxy, CASES[name], return_token_ids=True)
    assert_same_tokens(ids(answer), reference.generate(CASES[name], 12))


def test_sixteen_mixed_requests_at_once(deployment: Deployment, reference: Reference) -> None:
    mixed = [*CASES.values()][:8]
    mixed += [[user(noise(25 + 11 * i, 110 - 6 * i, 100 + i), "What digit is this?")] for i in range(8)]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda m: ask(deployment.proxy, m, return_token_ids=True), mixed))
    for messages, answer in zip(mixed, answers, strict=True):
        assert_same_tokens(ids(answer), reference.generate(messages, 12))


def test_the_openai_client_reads_a_digit_from_a_picture(deployment: Deployment) -> None:
    client = OpenAI(base_url=f"{deployment.proxy.url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": client.models.list().data[0].id, "temperature": 0}
    for names, asked in ((["seven"], "What digit is this?"), (["seven", "three"], "What digits are these?")):
        messages = [user(*map(shipped, names), asked)]
        whole = client.chat.completions.create(messages=messages, **options)
        chunks = client.chat.completions.create(messages=messages, stream=True, **options)
        assert whole.choices[0].message.content == " ".join(names)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == " ".join(names)


def test_no_pd_saw_a_pixel_and_every_picture_went_through_an_encoder_once(deployment: Deployment) -> None:
    def encoded() -> float:
        return sum(e.metric("epd_engine_encoder_items_total") for e in deployment.encoders)

    before = encoded()
    for _ in range(3):
        assert text(ask(deployment.proxy, question(1)))
    assert encoded() == before + 1
    for pd in deployment.pds:
        assert pd.metric("epd_engine_media_decoded_total") == 0
        assert pd.metric("epd_engine_encoder_items_total") == 0


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_an_entry_damaged_between_primer_and_decode_is_encoded_again_and_the_answer_is_right(
    deployment: Deployment, reference: Reference, damage: Callable[[Path], None], stream: bool
) -> None:
    angle = 10 + DAMAGES.index(damage) + (0.5 if stream else 0)
    assert text(ask(deployment.proxy, question(angle)))
    entry = deployment.newest_entry()
    assert text(ask(deployment.proxy, question(angle, "three")))  # evicts the first from the PD's memory
    before = deployment.proxy.metric("epd_proxy_reprimes_total")
    damage(entry)
    # Asked within the seconds in which the proxy trusts its last primer: only the PD can notice. After other
    # words: the PD knows the KV of a chat that begins like the first, and needs no entry for it.
    again = [{"role": "system", "content": "Look again."}, *question(angle)]
    answer = ask(deployment.proxy, again, return_token_ids=True, stream=stream)
    assert_same_tokens(streamed_ids(answer) if stream else ids(answer), reference.generate(again, 12))
    assert deployment.proxy.metric("epd_proxy_reprimes_total") == before + 1


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(e[6:]) for e in answer.text.split("\n\n") if e.startswith("data: {")]


def streamed_ids(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [t for e in events(answer) for c in e["choices"] for t in c["token_ids"]]


def test_an_encoder_killed_while_encoding_costs_no_request(deployment: Deployment) -> None:
    """It is stopped with the primer on it, so that it dies for certain while it has work."""
    victim = deployment.encoders[0]
    victim.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, deployment.proxy, question(20 + i)) for i in range(4)]
        eventually(lambda: any_waits_for(deployment, victim))
        victim.kill()
        for answer in asked:
            assert text(answer.result())


def any_waits_for(deployment: Deployment, server: Server) -> bool:
    roles = httpx.get(f"{deployment.proxy.url}/ready").json()
    return any(i["url"] == server.url and i["outstanding"] > 0 for i in instances(roles))


def instances(roles: Any) -> list[dict[str, Any]]:
    """Every instance that `/ready` lists, whatever the nesting."""
    if isinstance(roles, dict):
        if "url" in roles:
            return [roles]
        return [i for value in roles.values() for i in instances(value)]
    return [i for value in roles for i in instances(value)] if isinstance(roles, list) else []


def test_without_encoders_media_gets_a_clean_503_and_text_is_served(deployment: Deployment) -> None:
    for encoder in deployment.encoders:
        encoder.kill()
    answer = ask(deployment.proxy, question(30))
    assert answer.status_code == 503
    assert answer.json()["error"]["message"]
    assert text(ask(deployment.proxy, [{"role": "user", "content": "Hello?"}])) is not None


def test_a_pd_killed_in_the_middle_of_a_stream_ends_it_with_an_error_event(deployment: Deployment) -> None:
    url = f"{deployment.proxy.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=long_answer(stream=True), timeout=60) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()
        data = next(parts)
        (busy,) = [pd for pd in deployment.pds if pd.metric("epd_engine_requests_running") > 0]
        busy.kill()
        data += b"".join(parts)
    last = [e for e in data.decode().split("\n\n") if e.strip()][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "upstream_disconnected"
    assert b"[DONE]" not in data


def long_answer(**fields: Any) -> dict[str, Any]:
    """A request that is answered for as long as a test may need to do something about it."""
    messages = [{"role": "user", "content": "Hello?"}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 8000, "ignore_eos": True, **fields}


def test_a_client_that_leaves_frees_its_place_on_the_pd(deployment: Deployment) -> None:
    url = f"{deployment.proxy.url}/v1/chat/completions"
    for _ in range(4):
        body = long_answer(messages=question(40), stream=True)
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            next(response.iter_bytes())
    for pd in deployment.pds:
        eventually(lambda pd=pd: pd.metric("epd_engine_requests_running") == 0)  # type: ignore[misc]
        assert pd.metric("epd_engine_kv_cache_usage_ratio") == 0
        assert pd.metric("epd_engine_encoder_cache_referenced_embeddings") == 0


def test_two_encoders_that_write_one_key_at_once_leave_one_valid_entry(deployment: Deployment) -> None:
    messages: Messages = [{"role": "user", "content": [user(noise(90, 90, 7))["content"][0]]}]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(deployment.encoders[i % 2], messages), range(8)))
    keys = {key for a in answers for key in a.json()["ec_transfer_params"]}
    assert len(keys) == 1
    entry = deployment.entry(keys.pop())
    assert [p.name for p in entry.parent.iterdir()] == ["encoder_cache.safetensors"]
    asked = [user(noise(90, 90, 7), "What digit is this?")]
    assert text(ask(deployment.proxy, asked)) == text(ask(deployment.proxy, asked))


def test_one_id_is_in_every_log(deployment: Deployment) -> None:
    body = {"model": MODEL_NAME, "messages": question(50), "max_tokens": 2}
    headers = {"x-request-id": "trace-me-7"}
    answer = httpx.post(f"{deployment.proxy.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.headers["x-request-id"] == "trace-me-7"
    for servers in (deployment.encoders, deployment.pds, [deployment.proxy]):
        assert any("trace-me-7" in s.log.read_text() for s in servers)


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,aGVsbG8=", "file:///etc/hostname", "http://127.0.0.1:1/x.png"]
)
def test_a_bad_picture_is_refused_in_the_clients_terms(deployment: Deployment, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = ask(deployment.proxy, [{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_picture_of_one_pixel_and_a_very_large_one_are_answered(deployment: Deployment) -> None:
    for size in ((1, 1), (3000, 2000)):
        picture = Image.new("RGB", size, (200, 30, 30))
        assert ask(deployment.proxy, [user(picture, "What digit is this?")]).status_code == 200
