"""Extraction, keys and rewriting: decisions about values, without servers."""

from __future__ import annotations

import orjson
import pytest

from epd_proxy.errors import BadRequest
from epd_proxy.jsonbody import LIFT_FROM, JsonBody
from epd_proxy.media import Primed, digest, key_text, named, primer_doc, read_chat, rewrite

LONG = "A" * LIFT_FROM


def user(*parts, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}


def image(data="aaaa", **more):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}, **more}


def audio(data="bbbb", **more):
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, **more}


def items_of(doc, max_items=32):
    return read_chat(doc, max_items).items


def keys_of(doc):
    body = JsonBody(orjson.dumps(doc))
    return [digest(key_text(body, item)) for item in items_of(body.doc)]


def test_items_come_in_order_over_all_messages():
    doc = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [image("one"), {"type": "text", "text": "and"}, audio("two")]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": ["plain", {"type": "video_url", "video_url": {"url": "http://v"}}]},
        ]
    }
    found = items_of(doc)
    assert [(i.place.message, i.place.part, i.modality, i.remote) for i in found] == [
        (1, 0, "image", False),
        (1, 2, "audio", False),
        (3, 1, "video", True),
    ]


@pytest.mark.parametrize(
    ("doc", "param"),
    [
        ([], None),
        ({"messages": None}, "messages"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}, {"content": 7}]}, "messages[1].content"),
        ({"messages": [{"content": {"type": "text"}}]}, "messages[0].content"),
        (user(7), "messages[0].content[0]"),
        (user({"image_url": {"url": "http://x"}}), "messages[0].content[0].type"),
        (user({"type": 7}), "messages[0].content[0].type"),
        (user({"type": "image_url"}), "messages[0].content[0].image_url"),
        (user({"type": "image_url", "image_url": None, "uuid": "x"}), "messages[0].content[0].image_url"),
        (user({"type": "image_url", "image_url": "http://x"}), "messages[0].content[0].image_url"),
        (user({"type": "image_url", "image_url": {"url": 7}}), "messages[0].content[0].image_url.url"),
        (user({"type": "image_url", "image_url": {"url": ""}}), "messages[0].content[0].image_url.url"),
        (user({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].input_audio.data"),
        (user("hi", model=7), "model"),
        (user("hi", stream="yes"), "stream"),
        (user("hi", mm_processor_kwargs=[1]), "mm_processor_kwargs"),
        (user("hi", cache_salt=7), "cache_salt"),
        (user("hi", kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params"),
        (user("hi", ec_transfer_params={}), "ec_transfer_params"),
    ],
)
def test_a_wrong_type_is_refused_with_the_fields_name(doc, param):
    with pytest.raises(BadRequest) as refused:
        read_chat(doc, 32)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds"])
def test_a_client_cannot_name_encoder_cache_entries(kind):
    part = {"type": kind, kind: {"image_grid_thw": [1, 2, 2]}, "uuid": "0" * 64}
    with pytest.raises(BadRequest) as refused:
        read_chat(user(part), 32)
    assert refused.value.param == "messages[0].content[0].type"


def test_too_many_items_are_refused():
    assert len(items_of(user(image(), image()), max_items=2)) == 2
    with pytest.raises(BadRequest, match="3 media items; at most 2"):
        read_chat(user(image(), image(), image()), 2)


def test_equal_items_have_equal_keys_whatever_their_uuid_and_field_order():
    turned = {"image_url": {"url": "data:image/png;base64,aaaa"}, "uuid": "theirs", "type": "image_url"}
    first, second = keys_of(user(image("aaaa", uuid="mine"), turned))
    assert first == second


@pytest.mark.parametrize("data", ["aaaa", LONG])
def test_everything_that_the_encoder_hashes_is_in_the_key(data):
    variants = [
        user(image(data)),
        user(image(data + "A")),
        user({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}),
        user({"type": "video_url", "video_url": {"url": f"data:image/png;base64,{data}"}}),
        user(image(data), model="other"),
        user(image(data), cache_salt="tenant"),
        user(image(data), mm_processor_kwargs={"max_pixels": 64}),
        user(image(data), mm_processor_kwargs={"max_pixels": "64"}),
    ]
    assert len({keys_of(doc)[0] for doc in variants}) == len(variants)


def test_the_same_content_gives_one_key_where_one_copy_was_lifted_and_the_other_parsed():
    plain = orjson.dumps(user(image(LONG)))
    escaped = plain.replace(b"data:image/png", rb"data:image\/png")  # an escape keeps it with the parser
    keys = []
    for raw in (plain, escaped):
        body = JsonBody(raw)
        keys.append(digest(key_text(body, items_of(body.doc)[0])))
    assert keys[0] == keys[1]


def test_how_urgent_it_is_does_not_make_another_item():
    keys = set()
    for priority in (0, 5):
        body = JsonBody(orjson.dumps(user(image("x"), priority=priority)))
        keys.add(digest(key_text(body, items_of(body.doc)[0])))
    assert len(keys) == 1


def test_a_primer_carries_media_only_what_enters_the_mm_hash_and_how_urgent_it_is():
    doc = user(
        {"type": "text", "text": "secret"},
        image("x", uuid="theirs"),
        cache_salt="s",
        mm_processor_kwargs={"a": 1},
        priority=5,
        temperature=0.5,
        stream=True,
    )
    assert primer_doc(doc, items_of(doc)) == {
        "model": "m",
        "mm_processor_kwargs": {"a": 1},
        "cache_salt": "s",
        "priority": 5,
        "messages": [{"role": "user", "content": [image("x")]}],
        "max_tokens": 1,
        "stream": False,
    }


def rewritten(doc, *metadata):
    items = items_of(doc)
    return rewrite(doc, items, [Primed(f"k{i}", m) for i, m in enumerate(metadata)])


def test_media_become_metadata_and_the_rest_of_the_body_stays():
    words = {"type": "text", "text": "hi"}
    doc = user(words, image("x", uuid="theirs"), audio("y"), seed=1)
    before = orjson.dumps(doc)
    result, metadata_only = rewritten(doc, {"image_grid_thw": [1, 2, 2]}, {"audio_num_tokens": 5})
    assert result == user(
        words,
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": "k0"},
        {"type": "audio_embeds", "audio_embeds": {"audio_num_tokens": 5}, "uuid": "k1"},
        seed=1,
    )
    assert metadata_only
    assert orjson.dumps(doc) == before  # a second attempt starts from the same body


def test_one_item_without_metadata_keeps_its_whole_modality_raw_and_no_other():
    doc = user(image("x", uuid="theirs"), image("y"), audio("z"))
    result, metadata_only = rewritten(doc, {"image_grid_thw": [1, 2, 2]}, {}, {"audio_num_tokens": 5})
    parts = result["messages"][0]["content"]
    assert parts[:2] == [image("x"), image("y")]
    assert parts[2]["type"] == "audio_embeds"
    assert not metadata_only


def test_an_item_has_a_uuid_of_ours_wherever_its_media_go():
    doc = user(image("x", uuid="theirs"), cache_salt="s")
    (item,) = [named(item, bytes(range(32))) for item in items_of(doc)]
    ours = image("x", uuid=bytes(range(32)).hex())
    assert primer_doc(doc, [item])["messages"] == [{"role": "user", "content": [ours]}]
    result, _ = rewrite(doc, [item], [Primed("k", {})])
    assert result["messages"][0]["content"] == [ours]


def test_an_item_behind_a_url_has_none_since_its_bytes_may_change():
    (item,) = items_of(user({"type": "image_url", "image_url": {"url": "http://x"}, "uuid": "theirs"}))
    assert "uuid" not in named(item, bytes(32)).part


def test_a_uuid_is_stripped_from_any_part():
    doc = user(
        {"type": "text", "text": "hi", "uuid": "x"}, {"type": "input_image", "image_url": "u", "uuid": "y"}
    )
    chat = read_chat(doc, 32)
    assert chat.has_uuid
    assert not chat.items
    result, _ = rewrite(doc, (), ())
    assert result == user({"type": "text", "text": "hi"}, {"type": "input_image", "image_url": "u"})
