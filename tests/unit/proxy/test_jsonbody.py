"""Lifting long strings must never change what a body says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd_proxy.jsonbody import LIFT_FROM, JsonBody

LONG = "data:image/png;base64," + "A" * LIFT_FROM


def joined(pieces) -> bytes:
    return b"".join(pieces)


def test_a_long_data_url_is_not_in_the_parsed_document_but_in_its_rendering():
    raw = json.dumps({"a": {"url": LONG}, "b": [LONG[:-1], "x"]}).encode()
    body = JsonBody(raw)
    assert len(body.doc["a"]["url"]) < 100
    assert body.doc["a"]["url"].startswith("data:")
    assert json.loads(joined(body.render(body.doc))) == json.loads(raw)
    pieces = body.render(body.doc["a"])
    assert [type(piece) for piece in pieces] == [bytes, memoryview, bytes]


def test_audio_data_is_lifted_too():
    raw = json.dumps({"input_audio": {"data": "B" * LIFT_FROM, "format": "wav"}}).encode()
    body = JsonBody(raw)
    assert len(body.doc["input_audio"]["data"]) < 100
    assert json.loads(joined(body.render(body.doc))) == json.loads(raw)


@pytest.mark.parametrize(
    "value",
    [
        LONG + '"quoted"',
        LONG + "\\",
        "\\" + LONG,
        'text with "' + LONG + '" in it',
        'text with "data": "' + "A" * LIFT_FROM + '" in it',
        LONG + "é",
        "data:" + "A" * LIFT_FROM + "\n",
        {'"' + LONG: 1},
        {LONG: LONG},
        ["data", "data:", '"data', LONG],
        {'k"data': LONG},
    ],
)
def test_awkward_strings_survive(value):
    for raw in (json.dumps({"v": value}).encode(), json.dumps({"v": value}, ensure_ascii=False).encode()):
        body = JsonBody(raw)
        assert json.loads(joined(body.render(body.doc))) == {"v": value}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b'{"a": "unfinished',
        b'{"a": "' + LONG.encode(),
        b'{"a": "text"' + LONG.encode() + b'"}',
        b'{"a": "' + LONG.encode() + b'" "b"}',
        b'{"a": "' + LONG.encode() + b"\\",
        b'{"a": "\xff\xfe"}',
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_what_is_not_json_is_refused_whether_or_not_strings_were_lifted(raw):
    with pytest.raises(ValueError):
        JsonBody(raw)


def test_a_value_nested_too_deeply_to_be_written_is_a_value_error():
    body = JsonBody(b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}")
    with pytest.raises(ValueError, match="ecursion"):
        body.render(body.doc)


def test_canonical_text_does_not_depend_on_field_order():
    raw = json.dumps({"one": {"x": 1, "url": LONG}, "two": {"url": LONG, "x": 1}}).encode()
    body = JsonBody(raw)
    one, two = (joined(body.render(body.doc[name], canonical=True)) for name in ("one", "two"))
    assert one == two


_texts = (
    st.text()
    | st.sampled_from(["data:", '"data:', '\\"data:', '"data":"', "\\", '"'])
    | st.builds(lambda: LONG)
    | st.builds(lambda: LONG + '"')
    | st.builds(lambda: LONG + "\\")
)
_long = st.lists(_texts, max_size=4).map("".join)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _long,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_long, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(value=_values, ascii_only=st.booleans(), padding=st.booleans())
def test_any_document_renders_to_what_it_was(value, ascii_only, padding):
    value = {"v": value, "padding": "data:" + "A" * LIFT_FROM if padding else ""}
    raw = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    try:
        expected = json.loads(raw.decode())
        body = JsonBody(raw)
    except ValueError:  # a lone surrogate is no text
        return
    assert json.loads(joined(body.render(body.doc))) == expected
