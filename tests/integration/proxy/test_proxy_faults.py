"""What the proxy does when an engine is slow, dead, restarted, full, or lies."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from aiohttp import web

from tests.integration.proxy.harness import MakeSetup, image, states, text, until
from tests.integration.proxy.scripted import (
    ANSWER,
    DONE,
    ROLE,
    STREAM,
    answers,
    breaks_after,
    decode,
    error_body,
    event,
    fails,
    hangs,
    start_stream,
    stream,
    streams,
)

ERROR_EVENT = b'data: {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}\n\n'


def code(answer: httpx.Response) -> object:
    return answer.json()["error"]["code"]


# A missing encoder cache entry


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_miss_is_encoded_again_once_and_asked_with_a_fresh_body(setup: MakeSetup, streamed: bool):
    s = await setup()
    await s.chat(image("a"))  # now it is remembered
    s.pds[0].script.append(fails(503, "ec_miss"))
    answer = await s.chat(image("a"), text("?"), stream=streamed)
    assert answer.status_code == 200
    assert answer.content == (b"".join(STREAM) if streamed else ANSWER)
    assert len(s.encoders[0].calls) == 2
    first, second = s.pds[0].calls[1:]
    assert first.body == second.body
    assert await s.metric("epd_proxy_reprimes_total") == 1


async def test_after_a_miss_another_encoder_is_asked(setup: MakeSetup):
    s = await setup(encoders=2)
    s.pds[0].script.append(fails(503, "ec_miss"))
    assert (await s.chat(image("a"), image("b"))).status_code == 200
    first, second = ([call.sources for call in encoder.calls] for encoder in s.encoders)
    assert first == [["data:image/png;base64,a"], ["data:image/png;base64,b"]]
    assert second == [["data:image/png;base64,b"], ["data:image/png;base64,a"]]


async def test_a_re_prime_replaces_what_was_remembered(setup: MakeSetup):
    s = await setup()
    await s.chat(image("a"))
    s.pds[0].script.append(fails(503, "ec_miss"))
    await s.chat(image("a"))
    await s.chat(image("a"))
    assert len(s.encoders[0].calls) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_second_miss_is_said_to_the_client(setup: MakeSetup, streamed: bool):
    s = await setup()
    s.pds[0].script += [fails(503, "ec_miss")] * 2
    answer = await s.chat(image("a"), stream=streamed)
    assert (answer.status_code, code(answer)) == (503, "ec_miss")
    assert "retry-after" in answer.headers
    assert len(s.encoders[0].calls) == len(s.pds[0].calls) == 2


async def test_a_plain_500_on_metadata_only_is_taken_for_a_miss(setup: MakeSetup):
    s = await setup()
    s.pds[0].script.append(fails(500))
    assert (await s.chat(image("a"))).content == ANSWER
    assert len(s.encoders[0].calls) == 2
    s.pds[0].script += [fails(500)] * 2
    answer = await s.chat(image("b"))
    assert (answer.status_code, code(answer)) == (503, "ec_miss")


async def test_a_role_chunk_is_held_until_it_is_no_miss(setup: MakeSetup):
    s = await setup()
    s.pds[0].script.append(streams(ROLE, ERROR_EVENT, DONE))
    answer = await s.chat(image("a"), stream=True)
    assert answer.content == b"".join(STREAM)
    s.pds[0].script += [streams(ROLE, ERROR_EVENT, DONE), streams(ROLE + ERROR_EVENT + DONE)]
    answer = await s.chat(image("b"), stream=True)
    assert (answer.status_code, code(answer)) == (503, "ec_miss")


async def test_an_error_event_after_content_is_the_clients_to_see(setup: MakeSetup):
    s = await setup()
    said = [ROLE, event(content="s"), ERROR_EVENT, DONE]
    s.pds[0].script.append(streams(*said))
    assert (await s.chat(image("a"), stream=True)).content == b"".join(said)
    assert len(s.encoders[0].calls) == 1


async def test_an_error_event_that_blames_the_client_is_no_miss(setup: MakeSetup):
    s = await setup()
    said = [ROLE, ERROR_EVENT.replace(b"500", b"400"), DONE]
    s.pds[0].script.append(streams(*said))
    assert (await s.chat(image("a"), stream=True)).content == b"".join(said)


async def test_a_plain_500_on_text_goes_back_unchanged(setup: MakeSetup):
    s = await setup()
    s.pds[0].script.append(fails(500, "boom"))
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (500, "boom")
    assert len(s.pds[0].calls) == 1


async def test_a_vllm_that_dies_of_a_miss_costs_a_re_prime_and_another_pd(setup: MakeSetup):
    s = await setup(pds=2)
    s.pds[0].script.append(breaks_after(ROLE))
    answer = await s.chat(image("a"), stream=True)
    assert answer.content == b"".join(STREAM)
    assert [len(pd.calls) for pd in s.pds] == [1, 1]
    assert len(s.encoders[0].calls) == 2


# Encoders


@pytest.mark.parametrize(
    "broken",
    [fails(500), fails(503), fails(429), answers(b"{}"), answers(b'{"ec_transfer_params": {}}')],
)
async def test_a_primer_goes_to_another_encoder(setup: MakeSetup, broken):
    s = await setup(encoders=2)
    s.encoders[0].script.append(broken)
    assert (await s.chat(image("a"))).status_code == 200
    assert [len(e.calls) for e in s.encoders] == [1, 1]
    assert await s.metric('epd_proxy_retries_total{role="encoder"}') == 1


@pytest.mark.parametrize("part", [image("a"), text("hi")])
async def test_a_connection_lost_before_the_answer_is_tried_fresh_and_then_elsewhere(setup: MakeSetup, part):
    s = await setup(encoders=2, pds=2)
    role = s.encoders if part == image("a") else s.pds
    role[0].script += [breaks_after()] * 2  # the first one looks like a kept connection that went stale
    assert (await s.chat(part)).status_code == 200
    assert [len(engine.calls) for engine in role] == [2, 1]


async def test_a_request_that_kills_pds_does_not_kill_them_all(setup: MakeSetup):
    s = await setup(pds=4)
    for pd in s.pds:
        pd.default = breaks_after()
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (502, "upstream_disconnected")
    assert [bool(pd.calls) for pd in s.pds] == [True, True, False, False]


async def test_an_encoder_that_is_gone_is_skipped_and_then_taken_back(setup: MakeSetup):
    s = await setup(encoders=2)
    await s.encoders[0].stop()
    assert (await s.chat(image("a"))).status_code == 200
    assert len(s.encoders[1].calls) == 1
    await s.until_ready("encoder", [False, True])
    await s.encoders[0].start()
    await s.until_ready("encoder", [True, True])
    await s.chat(image("b"))
    assert len(s.encoders[0].calls) == 1


async def test_without_encoders_media_get_503_and_text_is_served(setup: MakeSetup):
    s = await setup(encoders=2)
    for encoder in s.encoders:
        await encoder.stop()
    for _ in range(2):  # found out by this request, and known by the next
        answer = await s.chat(image("a"))
        assert (answer.status_code, code(answer)) == (503, "no_encoder_available")
        assert "retry-after" in answer.headers
    assert (await s.chat(text("hi"))).content == ANSWER
    assert (await s.client.get("/ready")).status_code == 200


async def test_a_hanging_encoder_leaves_time_for_another(setup: MakeSetup):
    s = await setup(encoders=2, primer=1.0)
    s.encoders[0].script.append(hangs)
    assert (await s.chat(image("a"))).status_code == 200
    await s.encoders[0].wait_cut()


async def test_hanging_encoders_end_in_504(setup: MakeSetup):
    s = await setup(encoders=2, primer=0.4)
    for encoder in s.encoders:
        encoder.script.append(hangs)
    answer = await s.chat(image("a"))
    assert (answer.status_code, code(answer)) == (504, "encoder_timeout")
    assert not s.pds[0].calls


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_an_encoder_refuses_goes_back_unchanged(setup: MakeSetup, status: int):
    s = await setup(encoders=2)
    s.encoders[0].script.append(fails(status, "bad_image"))
    answer = await s.chat(image("a"))
    assert (answer.status_code, code(answer)) == (status, "bad_image")
    assert answer.json()["error"]["message"] == f"scripted {status}"
    assert [len(e.calls) for e in s.encoders] == [1, 0]


async def test_a_refusal_names_the_place_in_the_clients_request(setup: MakeSetup):
    async def refuses(call):
        bad = error_body("messages[0].content[1].image_url.url: no picture", "invalid_media")
        bad["error"]["param"] = "messages[0].content[1].image_url.url"
        return web.json_response(bad, status=400)

    s = await setup()
    s.encoders[0].script.append(refuses)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [image("a"), text("and"), image("a"), image("bad")]},
    ]
    answer = await s.client.post("/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert error["param"] == "messages[1].content[3].image_url.url"
    assert error["message"] == "messages[1].content[3].image_url.url: no picture"


async def test_a_lying_encoder_is_an_upstream_fault(setup: MakeSetup):
    s = await setup()
    s.encoders[0].script.append(answers(b'{"ec_transfer_params": null}'))
    answer = await s.chat(image("a"))
    assert (answer.status_code, code(answer)) == (502, "bad_primer_answer")


async def test_a_picture_that_could_not_be_stored_may_be_sent_again(setup: MakeSetup):
    """vLLM's encoders leave out of their answer what they could not save."""
    s = await setup()
    s.encoders[0].script.append(answers(b'{"ec_transfer_params": {}}'))
    answer = await s.chat(image("a"))
    assert (answer.status_code, code(answer)) == (503, "ec_store_unavailable")
    assert answer.headers["retry-after"] == "1"
    assert (await s.chat(image("a"))).status_code == 200


async def test_a_failing_encoder_is_an_upstream_fault(setup: MakeSetup):
    s = await setup()
    s.encoders[0].script.append(fails(500))
    answer = await s.chat(image("a"))
    assert (answer.status_code, code(answer)) == (502, "encoder_error")


# PDs


async def test_a_pd_that_is_gone_is_skipped(setup: MakeSetup):
    s = await setup(pds=2)
    await s.pds[0].stop()
    assert (await s.chat(text("hi"))).content == ANSWER
    assert len(s.pds[1].calls) == 1


async def test_without_pds_there_is_503_and_readiness_ends_and_returns(setup: MakeSetup):
    s = await setup()
    await s.pds[0].stop()
    for parts in ([text("hi")], [text("hi")], [image("a")]):
        answer = await s.chat(*parts)
        assert (answer.status_code, code(answer)) == (503, "no_pd_available")
    assert not s.encoders[0].calls
    ready = await s.client.get("/ready")
    assert (ready.status_code, states(ready, "pd"), states(ready, "encoder")) == (503, [False], [True])
    assert (await s.client.get("/health")).status_code == 200
    await s.pds[0].start()
    await s.until_ready("pd", [True])
    assert (await s.chat(text("hi"))).content == ANSWER


@pytest.mark.parametrize("broken", [fails(429), fails(503, "draining")])
async def test_text_goes_to_another_pd_once(setup: MakeSetup, broken):
    s = await setup(pds=3)
    s.pds[0].script.append(broken)
    assert (await s.chat(text("hi"))).content == ANSWER
    for pd in s.pds:
        pd.script.append(broken)
    before = sum(len(pd.calls) for pd in s.pds)
    assert (await s.chat(text("hi"))).status_code in (429, 503)
    assert sum(len(pd.calls) for pd in s.pds) == before + 2


async def test_a_full_pd_says_when_to_come_back(setup: MakeSetup):
    s = await setup()
    s.pds[0].script += [fails(429, "full", {"retry-after": "7"}), fails(429, "full")]
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer), answer.headers["retry-after"]) == (429, "full", "7")
    assert (await s.chat(text("hi"))).headers["retry-after"] == "1"


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_a_pd_refuses_goes_back_unchanged(setup: MakeSetup, status: int):
    s = await setup(pds=2)
    s.pds[0].script.append(fails(status, "too_long"))
    answer = await s.chat(image("a"), stream=True)
    assert (answer.status_code, code(answer)) == (status, "too_long")
    assert len(s.encoders[0].calls) == 1


@pytest.mark.parametrize("parts", [[text("hi")], [image("a")]])
async def test_a_pd_that_dies_mid_stream_ends_it_in_an_error_event(setup: MakeSetup, parts):
    s = await setup(pds=2)
    s.pds[0].script.append(breaks_after(ROLE, event(content="s"), b'data: {"choices": [{"del'))
    answer = await s.chat(*parts, stream=True)
    assert answer.status_code == 200
    said = ROLE + event(content="s")
    assert answer.content.startswith(said)
    last = answer.content[len(said) :]
    assert last.startswith(b"data: ")
    assert last.endswith(b"\n\n")
    assert json.loads(last[6:])["error"]["code"] == "upstream_disconnected"
    assert not s.pds[1].calls


async def test_an_answer_that_breaks_off_is_no_answer(setup: MakeSetup):
    async def half(call):
        response = await stream_head(call)
        await response.write(ANSWER[:20])
        call.request.transport.close()
        return response

    s = await setup()
    s.pds[0].script.append(half)
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (502, "upstream_disconnected")


async def stream_head(call):
    response = web.StreamResponse(
        headers={"content-type": "application/json", "content-length": str(len(ANSWER))}
    )
    await response.prepare(call.request)
    return response


async def test_a_pd_without_a_first_token_in_time_is_504_and_cut(setup: MakeSetup):
    s = await setup(pds=2, first_token=0.3)
    s.pds[0].script.append(hangs)
    answer = await s.chat(text("hi"), stream=True)
    assert (answer.status_code, code(answer)) == (504, "pd_timeout")
    await s.pds[0].wait_cut()
    assert not s.pds[1].calls


async def test_an_answer_that_takes_too_long_is_504(setup: MakeSetup):
    s = await setup(answer=0.3)
    s.pds[0].script.append(hangs)
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (504, "pd_timeout")


async def test_a_stream_that_stalls_ends_in_an_error_event(setup: MakeSetup):
    async def stalls(call):
        response = await start_stream(call)
        await response.write(ROLE + event(content="s"))
        return await hangs(call)

    s = await setup(idle=0.3)
    s.pds[0].script.append(stalls)
    answer = await s.chat(text("hi"), stream=True)
    assert answer.content.startswith(ROLE + event(content="s"))
    assert json.loads(answer.content.split(b"\n\n")[-2][6:])["error"]["code"] == "pd_timeout"
    await s.pds[0].wait_cut()


async def test_a_client_that_leaves_a_stream_frees_the_pd(setup: MakeSetup):
    async def endless(call):
        return await stream(call, _Endless())

    s = await setup()
    s.pds[0].script.append(endless)
    request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        async for _ in answer.aiter_bytes():
            break
    await s.pds[0].wait_cut()

    async def idle() -> bool:
        return not (await s.client.get("/ready")).json()["roles"]["pd"][0]["outstanding"]

    await until(idle)


class _Endless:
    def __iter__(self):
        while True:
            yield event(content="x" * 1000)


async def test_a_client_that_stops_reading_frees_the_pd_and_its_place(setup: MakeSetup):
    async def endless(call):
        return await stream(call, _Endless())

    s = await setup(idle=0.3)
    s.pds[0].script.append(endless)
    raw = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
    _, writer = await asyncio.open_connection(s.client.base_url.host, s.client.base_url.port, limit=1)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
    )
    await s.pds[0].wait_cut()
    await s.until_metric('epd_proxy_requests_total{stage="pd",status="499"}', 1)
    assert await s.metric("epd_proxy_in_flight") == 0
    assert await s.metric('epd_proxy_upstream_errors_total{kind="timeout",role="pd"}') == 0
    writer.close()


async def test_a_client_that_leaves_before_the_answer_frees_the_pd_without_ado(setup: MakeSetup, caplog):
    s = await setup()
    s.pds[0].script.append(hangs)
    request = asyncio.create_task(s.chat(text("hi")))
    await s.pds[0].wait_calls(1)
    request.cancel()
    await s.pds[0].wait_cut()
    await s.until_metric('epd_proxy_requests_total{stage="pd",status="499"}', 1)
    assert (await s.chat(text("hi"))).content == ANSWER
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_unready_pd_gets_no_traffic(setup: MakeSetup):
    s = await setup(pds=2)
    s.pds[0].ready_status = 503
    await s.until_ready("pd", [False, True])
    await s.chat(text("hi"))
    assert [len(pd.calls) for pd in s.pds] == [0, 1]


async def test_an_engine_without_ready_is_asked_for_its_health(setup: MakeSetup):
    s = await setup(pds=2)
    s.pds[0].has_ready = False
    s.pds[0].probes.clear()

    async def asked() -> bool:
        return "/health" in s.pds[0].probes

    await until(asked)
    assert states(await s.client.get("/ready"), "pd") == [True, True]


async def test_a_restarted_pd_is_used_again_though_connections_to_it_were_kept(setup: MakeSetup):
    s = await setup()
    for _ in range(2):
        assert (await s.chat(text("hi"))).content == ANSWER
    await s.pds[0].stop()
    await s.pds[0].start()
    await s.until_ready("pd", [True])
    assert (await s.chat(text("hi"))).content == ANSWER


async def test_a_chunk_reaches_the_client_before_the_next_one_is_made(setup: MakeSetup):
    gate = asyncio.Event()

    async def two_steps(call):
        response = await start_stream(call)
        await response.write(ROLE + event(content="s"))
        await gate.wait()
        await response.write(DONE)
        return response

    s = await setup()
    s.pds[0].script.append(two_steps)
    request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == ROLE + event(content="s")
        gate.set()
        assert b"".join([piece async for piece in pieces]) == DONE
    assert s.pds[0].default is decode
