"""Prefill and decode apart: what goes to whom, and what the proxy does when one of them fails."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.integration.proxy.harness import MakeSetup, body, image, states, text, until
from tests.integration.proxy.scripted import (
    ANSWER,
    DONE,
    ROLE,
    STREAM,
    answers,
    breaks_after,
    event,
    fails,
    hangs,
    metadata,
    mm_hash,
    prefill,
    prefilled,
    start_stream,
    streams,
)

ERROR_EVENT = b'data: {"error": {"message": "boom", "type": "server_error", "code": "kv_miss"}}\n\n'


def code(answer: httpx.Response) -> object:
    return answer.json()["error"]["code"]


def params(call) -> object:
    return call.body["kv_transfer_params"]


def numbered():
    """A prefill instance whose params differ each time."""
    made = iter(range(100))

    async def handler(call):
        return await prefilled({"handle": next(made)})(call)

    return handler


# The path of a request that goes well


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_picture_goes_from_encoder_to_prefill_to_decode(setup: MakeSetup, streamed: bool):
    s = await setup(prefills=1, decodes=1)
    given = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 7, "nothing": None}
    s.prefills[0].default = prefilled(given)
    options = {"max_tokens": 9, "n": 1, "stream": streamed, "temperature": 0.5}
    answer = await s.chat(text("What digit?"), image("seven"), **options)
    assert answer.content == (b"".join(STREAM) if streamed else ANSWER)
    source = "data:image/png;base64,seven"
    embeds = {"type": "image_embeds", "image_embeds": metadata(source), "uuid": mm_hash(source)}
    (asked,), (handed,) = s.prefills[0].calls, s.decodes[0].calls
    assert asked.body == {
        **body(text("What digit?"), embeds, **options),
        **{"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False},
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert handed.body == {**body(text("What digit?"), embeds, **options), "kv_transfer_params": given}
    assert asked.request.headers["x-request-id"] == handed.request.headers["x-request-id"]
    assert await s.metric("epd_proxy_reprefills_total") == 0


async def test_text_goes_through_both_too(setup: MakeSetup):
    s = await setup(encoders=0, prefills=1, decodes=1)
    assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) for one in (*s.prefills, *s.decodes)] == [1, 1]


async def test_prefill_and_decode_are_chosen_independently(setup: MakeSetup):
    s = await setup(prefills=2, decodes=2)
    s.prefills[0].script.append(hangs)
    waiting = asyncio.create_task(s.chat(text("hi")))
    await s.prefills[0].wait_calls(1)
    for _ in range(2):
        assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) for one in (*s.prefills, *s.decodes)] == [1, 2, 2, 0]
    waiting.cancel()


async def test_all_roles_are_known_to_ready_and_metrics(setup: MakeSetup):
    s = await setup(prefills=2, decodes=1)
    ready = await s.client.get("/ready")
    assert ready.status_code == 200
    assert {role: len(ones) for role, ones in ready.json()["roles"].items()} == {
        **{"encoder": 1, "prefill": 2, "decode": 1}
    }
    assert await s.metric('epd_proxy_instances_ready{role="prefill"}') == 2
    assert (await s.client.get("/v1/models")).json()["data"][0]["id"] == "digits"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_one_of_the_two_nothing_is_ready_and_nothing_is_begun(setup: MakeSetup, role: str):
    s = await setup(prefills=1, decodes=1)
    await (s.prefills if role == "prefill" else s.decodes)[0].stop()
    s.proxy.roles[role].pool.lost(next(iter(s.proxy.roles[role].pool)), "scripted")
    for part in (image("a"), text("hi")):
        answer = await s.chat(part)
        assert (answer.status_code, code(answer)) == (503, f"no_{role}_available")
        assert "retry-after" in answer.headers
    ready = await s.client.get("/ready")
    assert (ready.status_code, states(ready, role)) == (503, [False])
    assert not any(one.calls for one in (*s.encoders, *s.prefills, *s.decodes))


async def test_an_answer_that_ended_with_its_first_token_is_given_by_prefill(setup: MakeSetup):
    s = await setup(prefills=1, decodes=1)
    s.prefills[0].script += [prefilled(None, "stop"), streams(*STREAM)]
    answer = await s.chat(image("a"), stream=True, max_tokens=9)
    assert answer.content == b"".join(STREAM)
    last = s.prefills[0].calls[1].body
    assert (last["max_tokens"], last["stream"], "kv_transfer_params" in last) == (9, True, False)
    assert not s.decodes[0].calls


# Prefill


async def test_a_miss_of_the_encoder_cache_is_encoded_again_and_prefilled_again(setup: MakeSetup):
    s = await setup(prefills=1, decodes=1)
    s.prefills[0].script.append(fails(503, "ec_miss"))
    assert (await s.chat(image("a"))).content == ANSWER
    assert [len(one.calls) for one in (*s.encoders, *s.prefills, *s.decodes)] == [2, 2, 1]
    s.prefills[0].script += [fails(503, "ec_miss")] * 2
    answer = await s.chat(image("b"))
    assert (answer.status_code, code(answer)) == (503, "ec_miss")
    assert len(s.decodes[0].calls) == 1


@pytest.mark.parametrize("broken", [fails(429), fails(503, "draining"), answers(b"{}"), breaks_after()])
async def test_a_prefill_goes_to_another_instance(setup: MakeSetup, broken):
    s = await setup(prefills=2, decodes=1)
    s.prefills[0].script += [broken, broken]  # a reset of a kept connection is tried fresh first
    assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) > 0 for one in s.prefills] == [True, True]
    assert len(s.decodes[0].calls) == 1


@pytest.mark.parametrize(
    ("broken", "status", "said"),
    [
        (fails(429, "full"), 429, "full"),
        (answers(b"{}"), 502, "bad_prefill_answer"),
        (breaks_after(), 503, "upstream_disconnected"),
        (fails(400, "too_long"), 400, "too_long"),
        (fails(500, "boom"), 500, "boom"),
    ],
)
async def test_a_prefill_that_fails_everywhere_is_said_before_any_byte(
    setup: MakeSetup, broken, status: int, said: str
):
    s = await setup(prefills=3, decodes=1)
    for one in s.prefills:
        one.default = broken
    answer = await s.chat(text("hi"), stream=True)
    assert (answer.status_code, code(answer)) == (status, said)
    assert sum(len(one.calls) > 0 for one in s.prefills) == (1 if status in (400, 500) else 2)
    assert not s.decodes[0].calls


async def test_a_prefill_instance_that_is_gone_is_skipped(setup: MakeSetup):
    s = await setup(prefills=2, decodes=1)
    await s.prefills[0].stop()
    assert (await s.chat(image("a"))).content == ANSWER
    assert len(s.prefills[1].calls) == 1


async def test_a_prefill_that_takes_too_long_is_504_and_cut(setup: MakeSetup):
    s = await setup(prefills=2, decodes=1, prefill=0.3)
    s.prefills[0].script.append(hangs)
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (504, "prefill_timeout")
    await s.prefills[0].wait_cut()
    assert not any(one.calls for one in (s.prefills[1], s.decodes[0]))


# From prefill to decode

LOST = [
    fails(503, "kv_miss"),
    fails(500),
    breaks_after(),
    breaks_after(ROLE),
    streams(ROLE, ERROR_EVENT, DONE),
]


@pytest.mark.parametrize("lost", LOST)
async def test_kv_that_did_not_arrive_is_made_again_on_another_instance(setup: MakeSetup, lost):
    s = await setup(prefills=2, decodes=2)
    for n, one in enumerate(s.prefills):
        one.default = prefilled({"handle": n})
    s.decodes[0].script += [lost, lost]
    answer = await s.chat(image("a"), stream=True)
    assert answer.content == b"".join(STREAM)
    assert [len(one.calls) for one in s.prefills] == [1, 1]
    handed = [call for one in s.decodes for call in one.calls]
    assert params(handed[0]) == {"handle": 0}
    assert params(handed[-1]) == {"handle": 1}
    assert len(s.encoders[0].calls) == 1
    assert await s.metric("epd_proxy_reprefills_total") == 1


async def test_kv_that_did_not_arrive_is_made_again_with_fresh_params(setup: MakeSetup):
    s = await setup(prefills=1, decodes=1)
    s.prefills[0].default = numbered()
    s.decodes[0].script.append(fails(503, "kv_miss"))
    assert (await s.chat(text("hi"))).content == ANSWER
    assert [params(call) for call in s.decodes[0].calls] == [{"handle": 0}, {"handle": 1}]
    first, second = s.prefills[0].calls
    assert first.body == second.body


@pytest.mark.parametrize("streamed", [False, True])
async def test_kv_that_does_not_arrive_twice_is_said_to_the_client(setup: MakeSetup, streamed: bool):
    s = await setup(prefills=3, decodes=3)
    for one in s.decodes:
        one.default = fails(503, "kv_miss")
    answer = await s.chat(text("hi"), stream=streamed)
    assert (answer.status_code, code(answer)) == (503, "kv_miss")
    assert answer.json()["error"]["message"].endswith("twice: scripted 503")
    assert "retry-after" in answer.headers
    assert sum(len(one.calls) for one in s.prefills) == sum(len(one.calls) for one in s.decodes) == 2


@pytest.mark.parametrize("full", [fails(429), fails(503, "draining")])
async def test_what_a_full_decode_instance_refuses_another_one_takes(setup: MakeSetup, full):
    s = await setup(prefills=1, decodes=2)
    s.prefills[0].default = numbered()
    s.decodes[0].script.append(full)
    assert (await s.chat(text("hi"))).content == ANSWER
    assert len(s.prefills[0].calls) == 1
    assert [params(one.calls[0]) for one in s.decodes] == [{"handle": 0}] * 2
    for one in s.decodes:
        one.script.append(full)
    answer = await s.chat(text("hi"))
    assert answer.status_code in (429, 503)
    assert "retry-after" in answer.headers


async def test_what_cannot_reach_a_decode_instance_another_one_takes(setup: MakeSetup):
    s = await setup(prefills=1, decodes=2)
    await s.decodes[0].stop()
    assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) for one in (*s.prefills, *s.decodes)] == [1, 0, 1]


async def test_what_decode_refuses_goes_back_unchanged(setup: MakeSetup):
    s = await setup(prefills=1, decodes=2)
    s.decodes[0].script.append(fails(400, "bad_option"))
    answer = await s.chat(text("hi"))
    assert (answer.status_code, code(answer)) == (400, "bad_option")
    assert not s.decodes[1].calls


async def test_several_answers_are_refused_before_anything_is_computed(setup: MakeSetup):
    s = await setup(encoders=0, prefills=1, decodes=1)
    answer = await s.chat(text("hi"), n=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert not s.prefills[0].calls


async def test_a_decode_instance_without_a_first_event_in_time_is_504_and_cut(setup: MakeSetup):
    s = await setup(prefills=1, decodes=2, decode=0.3)
    s.decodes[0].script.append(hangs)
    answer = await s.chat(text("hi"), stream=True)
    assert (answer.status_code, code(answer)) == (504, "decode_timeout")
    await s.decodes[0].wait_cut()
    assert (len(s.prefills[0].calls), len(s.decodes[1].calls)) == (1, 0)


async def test_a_decode_instance_that_dies_mid_stream_ends_it_in_an_error_event(setup: MakeSetup):
    s = await setup(prefills=2, decodes=2)
    s.decodes[0].script.append(breaks_after(ROLE, event(content="s"), b'data: {"cho'))
    answer = await s.chat(image("a"), stream=True)
    said = ROLE + event(content="s")
    assert answer.status_code == 200
    assert answer.content.startswith(said)
    assert json.loads(answer.content[len(said) + 6 :])["error"]["code"] == "upstream_disconnected"
    assert sum(len(one.calls) for one in (*s.prefills, *s.decodes)) == 2


# Instances of different revisions


async def test_a_decode_instance_that_does_not_fit_is_passed_over_and_remembered(setup: MakeSetup):
    s = await setup(prefills=1, decodes=2)
    s.decodes[0].default = fails(409, "kv_incompatible")
    for _ in range(3):
        assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) for one in (*s.prefills, *s.decodes)] == [3, 1, 3]


async def test_a_prefill_instance_that_fits_no_decode_instance_is_passed_over(setup: MakeSetup):
    s = await setup(prefills=2, decodes=1)

    async def takes_the_second_ones(call):
        handler = fails(409, "kv_incompatible") if params(call) == {"handle": 0} else answers(ANSWER)
        return await handler(call)

    for n, one in enumerate(s.prefills):
        one.default = prefilled({"handle": n})
    s.decodes[0].default = takes_the_second_ones
    for _ in range(2):
        assert (await s.chat(text("hi"))).content == ANSWER
    assert [len(one.calls) for one in s.prefills] == [1, 2]


async def test_where_nothing_fits_the_reason_is_said(setup: MakeSetup):
    s = await setup(prefills=1, decodes=1)
    s.decodes[0].default = fails(409, "kv_incompatible")
    for _ in range(2):  # found out by this request, and known by the next
        answer = await s.chat(text("hi"), stream=True)
        assert (answer.status_code, code(answer)) == (503, "kv_incompatible")
        assert "scripted 409" in answer.json()["error"]["message"]
    s.decodes[0].default = streams(*STREAM)  # restarted with what fits
    assert (await s.chat(text("hi"), stream=True)).content == b"".join(STREAM)


# Clients that leave


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_leaves_closes_the_call_of_its_stage(setup: MakeSetup, role: str):
    s = await setup(prefills=1, decodes=1)
    (engine,) = s.prefills if role == "prefill" else s.decodes
    engine.script.append(hangs)
    request = asyncio.create_task(s.chat(text("hi")))
    await engine.wait_calls(1)
    request.cancel()
    await engine.wait_cut()
    await s.until_metric(f'epd_proxy_requests_total{{stage="{role}",status="499"}}', 1)

    async def idle() -> bool:
        roles = (await s.client.get("/ready")).json()["roles"]
        return not any(one["outstanding"] for ones in roles.values() for one in ones)

    await until(idle)
    assert (await s.chat(text("hi"))).content == ANSWER


async def test_a_client_that_leaves_a_stream_frees_the_decode_instance(setup: MakeSetup):
    async def endless(call):
        response = await start_stream(call)
        while True:
            await response.write(event(content="x" * 1000))

    s = await setup(prefills=1, decodes=1)
    s.decodes[0].script.append(endless)
    async with s.client.stream("POST", "/v1/chat/completions", json=body(text("hi"), stream=True)) as answer:
        async for _ in answer.aiter_bytes():
            break
    await s.decodes[0].wait_cut()
    assert s.prefills[0].default is prefill
