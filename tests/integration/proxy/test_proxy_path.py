"""The path of a request that goes well."""

from __future__ import annotations

from tests.integration.proxy.harness import MakeSetup, body, image, text
from tests.integration.proxy.scripted import ANSWER, STREAM, metadata, mm_hash


async def test_a_picture_reaches_the_pd_as_metadata_and_the_answer_comes_back_unchanged(setup: MakeSetup):
    s = await setup()
    answer = await s.chat(text("What digit?"), image("seven"))
    assert (answer.status_code, answer.content) == (200, ANSWER)
    (primer,) = s.encoders[0].calls
    assert primer.body == {
        "model": "digits",
        "messages": [{"role": "user", "content": [image("seven")]}],
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


async def test_text_goes_straight_to_the_pd_with_the_clients_own_bytes(setup: MakeSetup):
    s = await setup(encoders=0)
    raw = b'{ "messages" : [{"role":"user","content":"h\\u00e9llo"}],   "model":"digits" , "seed":1.50}'
    answer = await s.client.post("/v1/chat/completions", content=raw)
    assert answer.content == ANSWER
    assert s.pds[0].calls[0].raw == raw
