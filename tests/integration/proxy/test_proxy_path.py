"""The path of a request that goes well."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import ANY

from epd_proxy.jsonbody import JsonBody
from tests.integration.proxy.harness import MakeSetup, body, image, text
from tests.integration.proxy.scripted import ANSWER, STREAM, metadata, mm_hash, start_stream


async def test_a_picture_reaches_the_pd_as_metadata_and_the_answer_comes_back_unchanged(setup: MakeSetup):
    s = await setup()
    answer = await s.chat(text("What digit?"), image("seven"))
    assert (answer.status_code, answer.content) == (200, ANSWER)
    (primer,) = s.encoders[0].calls
    assert primer.body == {
        "model": "digits",
        "messages": [{"role": "user", "content": [image("seven", uuid=ANY)]}],
        "max_tokens": 1,
        "stream": False,
    }
    (call,) = s.pds[0].calls
    source = "data:image/png;base64,seven"
    embeds = {"type": "image_embeds", "image_embeds": metadata(source), "uuid": mm_hash(source)}
    assert call.body == body(text("What digit?"), embeds)


async def test_a_stream_passes_byte_for_byte(setup: MakeSetup):
    s = await setup()
    answer = await s.chat(text("What digit?"), image("seven"), stream=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content == b"".join(STREAM)
    assert s.pds[0].calls[0].body["stream"] is True


async def test_the_body_is_let_go_once_the_answer_has_begun(setup: MakeSetup):
    s = await setup()
    gate = asyncio.Event()

    async def two_steps(call):
        response = await start_stream(call)
        await response.write(STREAM[0] + STREAM[1])
        await gate.wait()
        return response

    s.pds[0].script.append(two_steps)
    request = body(text("What digit?"), image("A" * 100_000), stream=True)
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, JsonBody)]
        gate.set()
        assert [piece async for piece in pieces] == []


async def test_text_goes_straight_to_the_pd_with_the_clients_own_bytes(setup: MakeSetup):
    s = await setup(encoders=0)
    raw = b'{ "messages" : [{"role":"user","content":"h\\u00e9llo"}],   "model":"digits" , "seed":1.50}'
    answer = await s.client.post("/v1/chat/completions", content=raw)
    assert answer.content == ANSWER
    assert s.pds[0].calls[0].raw == raw
