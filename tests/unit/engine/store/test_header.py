import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd_engine.ec_store.entry import encode_header, payload_view
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.header import PlainHeader, parse_header


def parse(data: bytes, foreign: bool = False) -> PlainHeader:
    return parse_header(memoryview(data), len(data), PlainHeader, foreign=foreign)[0]


def entry(change: Any = None) -> bytes:
    """A whole entry, its header changed by `change`."""
    tensor = torch.zeros(3, 4)
    header = encode_header(tensor, fingerprint="f" * 64, modality="image", metadata={"n": 1})
    document = json.loads(header[8:])
    if change:
        change(document)
    text = json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + bytes(payload_view(tensor))


def said(**fields: str) -> Any:
    return lambda document: document["__metadata__"].update(fields)


def test_an_entry_is_understood_without_torch() -> None:
    header = parse(entry())
    assert (header.dtype_name, header.shape, header.payload_bytes) == ("F32", (3, 4), 48)
    assert header.metadata == {"n": 1}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (said(format_version="0"), "format version 0, not 1"),
        (said(format_version="2"), "format version 2, not 1"),
        (said(checksum_algorithm="crc32"), "checksum is 'crc32', not xxh3-128"),
        (said(checksum_algorithm="none"), "checksum is 'none'"),
        (lambda d: d.pop("__metadata__"), "none of our metadata.*accept_foreign"),
        (lambda d: d.update(__metadata__={"format": "pt"}), "none of our metadata"),
        (lambda d: d.update(other=d["ec_cache"]), "disagree"),
        (lambda d: d["ec_cache"].update(dtype="I64"), "cannot be read"),
        (lambda d: d["ec_cache"].update(shape=[4, 4]), "disagree"),
        (lambda d: d["ec_cache"].update(shape=[-3, -4]), "disagree"),
        (lambda d: d["ec_cache"].update(shape=[12]), "cannot be read"),
        (lambda d: d["ec_cache"].update(data_offsets=[0, 1 << 60]), "disagree"),
        (lambda d: d.update(__metadata__=[1]), "none of our metadata|cannot be read"),
    ],
)
def test_what_is_not_an_entry_of_this_version_is_refused_by_name(change: Any, match: str) -> None:
    with pytest.raises(EntryDamaged, match=match):
        parse(entry(change))


def test_a_foreign_entry_has_a_shape_and_a_dtype_alone() -> None:
    header = parse(entry(lambda d: d.pop("__metadata__")), foreign=True)
    assert header.foreign
    assert (header.shape, header.dtype_name, header.checksum, header.fingerprint) == ((3, 4), "F32", "", "")
    assert not parse(entry(), foreign=True).foreign


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_an_entry_or_damaged(data: bytes, foreign: bool) -> None:
    with pytest.raises(EntryDamaged):
        parse(data, foreign)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["__metadata__", "ec_cache"]), JSON, st.booleans())
def test_any_json_in_a_headers_place_is_an_entry_or_damaged(part: str, value: Any, foreign: bool) -> None:
    try:
        parse(entry(lambda d: d.update({part: value})), foreign)
    except EntryDamaged:
        pass


@given(st.integers(0, 400), st.integers(0, 255))
def test_any_changed_byte_of_a_header_is_noticed_or_harmless(at: int, value: int) -> None:
    data = bytearray(entry())
    data[at % (len(data) - 48)] = value
    try:
        header = parse(bytes(data))
    except EntryDamaged:
        return
    assert header.payload_bytes == 48
