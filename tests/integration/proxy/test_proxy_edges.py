"""Bad input, limits, ids, and the routes beside chat completions."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from aiohttp import web

from tests.integration.proxy.harness import MakeSetup, body, image, text
from tests.integration.proxy.scripted import ANSWER, decode, encode, waits


def error(answer: httpx.Response) -> dict:
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"not json", None),
        (b'{"messages": [', None),
        (b"[]", None),
        (b'{"messages": "hi"}', "messages"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content[0].image_url",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_embeds"}]}]}',
            "messages[0].content[0].type",
        ),
        (b'{"model": 7, "messages": [{"role": "user", "content": "hi"}]}', "model"),
    ],
)
async def test_bad_bodies_are_refused_in_openais_words_and_nothing_is_sent(setup: MakeSetup, raw, param):
    s = await setup()
    answer = await s.client.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 400
    assert error(answer)["param"] == param
    assert error(answer)["type"] == "invalid_request_error"
    assert not s.pds[0].calls
    assert not s.encoders[0].calls
    assert await s.metric('epd_proxy_requests_total{stage="proxy",status="400"}') == 1
    assert (await s.chat(text("hi"))).content == ANSWER


async def test_bodies_that_are_too_much_together_get_429_until_one_is_gone(setup: MakeSetup):
    s = await setup(max_buffered=3000)
    gate = asyncio.Event()
    s.pds[0].default = waits(gate, decode)
    first = asyncio.create_task(s.chat(text("x" * 2000)))
    await s.pds[0].wait_calls(1)
    assert await s.metric("epd_proxy_buffered_bytes") > 2000

    async def in_pieces():
        for piece in (b'{"messages": [{"role": "user", "content": "', b"x" * 2000, b'"}]}'):
            yield piece

    for content in (b"x" * 2000, in_pieces()):
        answer = await s.client.post("/v1/chat/completions", content=content)
        assert (answer.status_code, error(answer)["code"]) == (429, "too_many_requests")
        assert answer.headers["retry-after"] == "1"
    assert (await s.client.get("/v1/models")).status_code == 200
    gate.set()
    assert (await first).status_code == 200
    assert await s.metric("epd_proxy_buffered_bytes") == 0
    assert (await s.chat(text("x" * 2000))).status_code == 200


async def test_a_body_nested_too_deeply_is_refused(setup: MakeSetup):
    s = await setup()
    nested = b"[" * 500 + b"]" * 500
    raw = (
        httpx.Request("POST", "http://x", json=body(image("a"))).content[:-1] + b', "extra": ' + nested + b"}"
    )
    answer = await s.client.post("/v1/chat/completions", content=raw)
    assert (answer.status_code, error(answer)["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(setup: MakeSetup, chunked: bool):
    s = await setup(max_body=100_000)

    async def pieces():
        for _ in range(11):
            yield b" " * 10_000

    content = pieces() if chunked else b" " * 100_001
    answer = await s.client.post("/v1/chat/completions", content=content)
    assert (answer.status_code, error(answer)["code"]) == (413, "body_too_large")
    assert "100000 bytes" in error(answer)["message"]
    assert (await s.chat(text("hi"))).content == ANSWER


async def test_a_body_that_does_not_arrive_is_408(setup: MakeSetup):
    s = await setup(idle=0.2)
    reader, writer = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_too_many_items_are_refused(setup: MakeSetup):
    s = await setup(max_items=2)
    assert (await s.chat(image("a"), image("b"))).status_code == 200
    answer = await s.chat(image("a"), image("b"), image("c"))
    assert (answer.status_code, error(answer)["param"]) == (400, "messages")


async def test_more_requests_than_allowed_get_429_and_the_next_one_is_served(setup: MakeSetup):
    s = await setup(max_in_flight=1)
    gate = asyncio.Event()
    s.pds[0].script.append(waits(gate, decode))
    first = asyncio.create_task(s.chat(text("hi")))
    await s.pds[0].wait_calls(1)
    answer = await s.chat(text("hi"))
    assert (answer.status_code, error(answer)["type"]) == (429, "rate_limit_error")
    assert int(answer.headers["retry-after"]) >= 1
    gate.set()
    assert (await first).content == ANSWER
    assert (await s.chat(text("hi"))).content == ANSWER


async def test_a_uuid_of_the_clients_never_passes(setup: MakeSetup):
    s = await setup()
    await s.chat({**text("hi"), "uuid": "../../x"})
    assert s.pds[0].calls[0].parts == [text("hi")]


async def test_fields_that_enter_the_key_reach_encoder_and_pd(setup: MakeSetup):
    s = await setup()
    fields = {"mm_processor_kwargs": {"max_pixels": 64}, "cache_salt": "tenant"}
    await s.chat(image("a"), **fields)
    for call in (s.encoders[0].calls[0], s.pds[0].calls[0]):
        assert {name: call.body[name] for name in fields} == fields


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, None, "a" * 129, "bad id", "é"])
async def test_one_request_id_goes_through_everything(setup: MakeSetup, given: str | None, caplog):
    caplog.set_level("INFO", "epd_proxy")
    s = await setup()
    headers = [] if given is None else [(b"x-request-id", given.encode())]
    answer = await s.client.post("/v1/chat/completions", json=body(image("a")), headers=headers)
    seen = answer.headers["x-request-id"]
    if given in ("abc-123", "a" * 128):
        assert seen == given
    else:
        assert re.fullmatch(r"[0-9a-f]{32}", seen)
    for engine in (s.encoders[0], s.pds[0]):
        assert engine.calls[0].request.headers["x-request-id"] == seen
    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]
    assert [(line["request_id"], line["status"], line["items"]) for line in lines] == [(seen, 200, 1)]


async def test_every_answer_carries_its_id(setup: MakeSetup):
    s = await setup()
    for method, path in [("GET", "/health"), ("GET", "/v1/models"), ("GET", "/nowhere"), ("GET", "/metrics")]:
        answer = await s.client.request(method, path, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
    bad = await s.client.post("/v1/chat/completions", content=b"", headers={"x-request-id": "mine"})
    assert bad.headers.get_list("x-request-id") == ["mine"]


async def test_an_engines_headers_pass_but_for_those_of_its_connection(setup: MakeSetup):
    async def with_headers(call):
        headers = {"x-request-id": "the engine's", "x-more": "kept", "keep-alive": "timeout=5"}
        return web.Response(body=ANSWER, content_type="application/json", headers=headers)

    s = await setup()
    s.pds[0].script.append(with_headers)
    answer = await s.chat(text("hi"), headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers["x-more"] == "kept"
    assert "keep-alive" not in answer.headers
    assert len(answer.headers.get_list("date")) == 1
    assert answer.headers.get_list("content-length") == [str(len(ANSWER))]


async def test_the_clients_credentials_reach_the_engines(setup: MakeSetup):
    s = await setup()
    await s.chat(image("a"), headers={"authorization": "Bearer k"})
    for engine in (s.encoders[0], s.pds[0]):
        assert engine.calls[0].request.headers["authorization"] == "Bearer k"


async def test_models_come_from_a_pd(setup: MakeSetup):
    s = await setup(pds=2)
    await s.pds[0].stop()
    answer = await s.client.get("/v1/models")
    assert [model["id"] for model in answer.json()["data"]] == ["digits"]
    await s.pds[1].stop()
    answer = await s.client.get("/v1/models")
    assert (answer.status_code, error(answer)["code"]) == (503, "no_pd_available")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/completions", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
async def test_other_routes_do_not_exist(setup: MakeSetup, method, path, status):
    s = await setup()
    answer = await s.client.request(method, path)
    assert answer.status_code == status
    assert path in error(answer)["message"]


async def test_ready_lists_every_instance(setup: MakeSetup):
    s = await setup(encoders=2)
    ready = await s.client.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {
        "status": "ready",
        "roles": {
            role: [{"url": e.url, "ready": True, "reason": "ready", "outstanding": 0} for e in engines]
            for role, engines in (("encoder", s.encoders), ("pd", s.pds))
        },
    }


async def test_metrics_count_what_happened(setup: MakeSetup):
    s = await setup()
    await s.chat(image("a"), image("b"))
    await s.chat(text("hi"), stream=True)
    expected = {
        'epd_proxy_requests_total{stage="pd",status="200"}': 2,
        "epd_proxy_primers_total": 1,
        "epd_proxy_primed_items_total": 2,
        "epd_proxy_primer_seconds_count": 1,
        "epd_proxy_primer_wait_seconds_count": 1,
        "epd_proxy_ttft_seconds_count": 2,
        "epd_proxy_in_flight": 0,
        'epd_proxy_instances_ready{role="pd"}': 1,
    }
    assert {name: await s.metric(name) for name in expected} == expected


async def test_requests_in_flight_are_counted_while_they_last(setup: MakeSetup):
    s = await setup()
    gate = asyncio.Event()
    s.encoders[0].script.append(waits(gate, encode))
    request = asyncio.create_task(s.chat(image("a")))
    await s.encoders[0].wait_calls(1)
    assert await s.metric("epd_proxy_in_flight") == 1
    gate.set()
    await request
    assert await s.metric("epd_proxy_in_flight") == 0
