"""Batching, spreading, single flight, and what was encoded a moment ago."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.integration.proxy.harness import MakeSetup, Setup, image, text
from tests.integration.proxy.scripted import Engine, encode, fails, metadata, mm_hash, primed, waits


def source(name: str) -> str:
    return f"data:image/png;base64,{name}"


def seen_by(engine: Engine) -> list[list[str]]:
    return [[s.rpartition(",")[2] for s in call.sources] for call in engine.calls]


def uuids(setup: Setup, call: int = 0, pd: int = 0) -> list[str]:
    return [part["uuid"] for part in setup.pds[pd].calls[call].parts if "uuid" in part]


async def test_items_for_one_encoder_travel_together_in_order_and_equal_ones_once(setup: MakeSetup):
    s = await setup()
    await s.chat(image("a", uuid="mine"), text("and"), image("b"), image("a"), image("c"))
    assert seen_by(s.encoders[0]) == [["a", "b", "c"]]
    ours = [part["uuid"] for part in s.encoders[0].calls[0].parts]
    assert all(re.fullmatch("[0-9a-f]{64}", uuid) for uuid in ours)
    assert len(set(ours)) == 3
    assert uuids(s) == [mm_hash(source(name)) for name in "abac"]


async def test_items_spread_over_encoders_in_parallel_with_positions_kept(setup: MakeSetup):
    s = await setup(encoders=2)
    gate = asyncio.Event()
    for encoder in s.encoders:
        encoder.script.append(waits(gate, encode))
    request = asyncio.create_task(s.chat(*map(image, "abcde")))
    for encoder in s.encoders:
        await encoder.wait_calls(1)  # both are asked before either answers
    gate.set()
    assert (await request).status_code == 200
    assert seen_by(s.encoders[0]) == [["a", "c", "e"]]
    assert seen_by(s.encoders[1]) == [["b", "d"]]
    assert uuids(s) == [mm_hash(source(name)) for name in "abcde"]


async def test_load_follows_outstanding_items(setup: MakeSetup):
    s = await setup(encoders=2)
    gate = asyncio.Event()
    s.encoders[0].script.append(waits(gate, encode))
    first = asyncio.create_task(s.chat(image("a")))
    await s.encoders[0].wait_calls(1)
    await s.chat(image("b"))
    await s.chat(image("c"))
    assert seen_by(s.encoders[1]) == [["b"], ["c"]]
    gate.set()
    await first
    await s.chat(image("d"))
    assert seen_by(s.encoders[0]) == [["a"], ["d"]]


async def test_equal_items_of_concurrent_requests_are_encoded_once(setup: MakeSetup):
    s = await setup()
    gate = asyncio.Event()
    s.encoders[0].script.append(waits(gate, encode))
    requests = [asyncio.create_task(s.chat(image("a"))) for _ in range(5)]
    await s.until_metric("epd_proxy_single_flight_hits_total", 4)
    gate.set()
    assert [(await r).status_code for r in requests] == [200] * 5
    assert seen_by(s.encoders[0]) == [["a"]]
    assert all(uuids(s, call) == [mm_hash(source("a"))] for call in range(5))


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "tenant"},
        {"mm_processor_kwargs": {"max_pixels": 64}},
        {"model": "other"},
    ],
)
async def test_items_under_another_key_share_nothing(setup: MakeSetup, other: dict):
    s = await setup()
    gate = asyncio.Event()
    s.encoders[0].script += [waits(gate, encode)] * 2
    requests = [asyncio.create_task(s.chat(image("a"), **fields)) for fields in ({}, other)]
    await s.encoders[0].wait_calls(2)
    gate.set()
    await asyncio.gather(*requests)
    assert {name: s.encoders[0].calls[1].body.get(name) for name in other} == other or {
        name: s.encoders[0].calls[0].body.get(name) for name in other
    } == other


async def test_a_moment_later_an_item_skips_the_encoder_unless_it_lies_behind_a_url(setup: MakeSetup):
    s = await setup()
    remote = {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
    for _ in range(2):
        await s.chat(image("a"), remote)
    assert s.encoders[0].calls[0].sources == [source("a"), "http://example.org/a.png"]
    assert s.encoders[0].calls[1].sources == ["http://example.org/a.png"]
    assert await s.metric("epd_proxy_recent_hits_total") == 1


async def test_errors_are_not_remembered(setup: MakeSetup):
    s = await setup()
    s.encoders[0].script.append(fails(422))
    assert (await s.chat(image("a"))).status_code == 422
    assert (await s.chat(image("a"))).status_code == 200


async def test_a_request_is_not_refused_for_an_item_of_another_request(setup: MakeSetup):
    s = await setup()
    gate = asyncio.Event()
    s.encoders[0].script.append(waits(gate, fails(400)))
    first = asyncio.create_task(s.chat(image("good"), image("bad")))
    await s.encoders[0].wait_calls(1)
    second = asyncio.create_task(s.chat(image("good")))
    await s.until_metric("epd_proxy_single_flight_hits_total", 1)
    gate.set()
    assert (await first).status_code == 400
    assert (await second).status_code == 200
    assert seen_by(s.encoders[0]) == [["good", "bad"], ["good"]]


async def test_a_modality_without_metadata_keeps_its_media_under_the_key_that_the_encoder_got(
    setup: MakeSetup,
):
    s = await setup()
    s.encoders[0].default = lambda call: _primed_as(
        call, lambda src: {} if src.endswith("b") else metadata(src)
    )
    await s.chat(image("a", uuid="x"), image("b"))
    named = s.encoders[0].calls[0].parts
    assert [part["image_url"] for part in named] == [image(name)["image_url"] for name in "ab"]
    assert s.pds[0].calls[0].parts == named


async def _primed_as(call, describe):
    return primed(call, describe)


async def test_large_pictures_arrive_whole(setup: MakeSetup):
    s = await setup()
    name = "A" * 3_000_000
    answer = await s.chat(image(name), image(name), image("b"))
    assert answer.status_code == 200
    assert s.encoders[0].calls[0].sources == [source(name), source("b")]
    assert uuids(s) == [mm_hash(source(name)), mm_hash(source(name)), mm_hash(source("b"))]


async def test_a_client_that_leaves_ends_its_primer(setup: MakeSetup):
    s = await setup()
    s.encoders[0].script.append(waits(asyncio.Event(), encode))
    request = asyncio.create_task(s.chat(image("a")))
    await s.encoders[0].wait_calls(1)
    request.cancel()
    await s.encoders[0].wait_cut()
    await s.until_metric('epd_proxy_requests_total{stage="encoder",status="499"}', 1)
    assert await s.metric("epd_proxy_in_flight") == 0
    assert (await s.chat(image("a"))).status_code == 200


async def test_a_primer_lives_on_while_another_client_waits_for_it(setup: MakeSetup):
    s = await setup()
    gate = asyncio.Event()
    s.encoders[0].script.append(waits(gate, encode))
    first = asyncio.create_task(s.chat(image("a")))
    await s.encoders[0].wait_calls(1)
    second = asyncio.create_task(s.chat(image("a")))
    await s.until_metric("epd_proxy_single_flight_hits_total", 1)
    first.cancel()
    await s.until_metric('epd_proxy_requests_total{stage="encoder",status="499"}', 1)
    gate.set()
    assert (await second).status_code == 200
    assert len(s.encoders[0].calls) == 1
    assert not s.encoders[0].cut_calls
