"""Whole events, and what they say."""

from __future__ import annotations

import json

import pytest

from epd_proxy.errors import ProxyError
from epd_proxy.sse import EventBuffer, error_event, is_role_only, is_server_error, payloads

EVENTS = 'data: {"a": "é"}\n\ndata: {}\r\n\r\n: ping\n\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_bytes_pass_unchanged_and_only_whole_events_pass(size):
    buffer, passed = EventBuffer(), b""
    for at in range(0, len(EVENTS), size):
        whole = buffer.feed(EVENTS[at : at + size])
        assert whole == b"" or whole.endswith((b"\n\n", b"\r\n\r\n"))
        passed += whole
    assert passed == EVENTS
    assert buffer.flush() == b""


def test_an_unfinished_event_waits_and_is_handed_out_at_a_proper_end():
    buffer = EventBuffer()
    assert buffer.feed(b'data: 1\n\ndata: {"half') == b"data: 1\n\n"
    assert buffer.flush() == b'data: {"half'
    assert buffer.flush() == b""


def test_an_endless_event_is_not_kept():
    buffer = EventBuffer()
    passed = b"".join(buffer.feed(b"x" * 65536) for _ in range(64))
    assert len(passed) > 2 << 20


def chunk(delta, finish=None):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (chunk({"role": "assistant", "content": ""}), True),
        (chunk({"role": "assistant"}), True),
        (chunk({"role": "assistant", "content": "s"}), False),
        (chunk({"role": "assistant", "content": None, "tool_calls": [{}]}), False),
        (chunk({"reasoning_content": "hm"}), False),
        (chunk({}, "stop"), False),
        ({"choices": []}, False),
        ({"error": {"message": "x"}}, False),
        ({"choices": [7]}, False),
        (None, False),
    ],
)
def test_role_only_chunks(payload, expected):
    assert is_role_only(payload) is expected


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"error": {"message": "x", "code": 500}}, True),
        ({"error": {"message": "x", "code": "ec_miss"}}, True),
        ({"error": {"message": "x"}}, True),
        ({"error": {"message": "x", "code": 400}}, False),
        ({"error": "x"}, False),
        (chunk({"content": "x"}), False),
        (None, False),
    ],
)
def test_server_errors(payload, expected):
    assert is_server_error(payload) is expected


def test_payloads_of_events():
    assert payloads(b': hello\n\ndata: {"a": 1}\n\ndata: [DONE]\n\ndata: [1]\r\n\r\n') == [
        {"a": 1},
        None,
        None,
    ]


def test_the_error_event_is_one_event_with_openais_error():
    event = error_event(ProxyError(502, "line\nbreak", code="upstream_disconnected"))
    assert event.startswith(b"data: ")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:]) == {
        "error": {
            "message": "line\nbreak",
            "type": "server_error",
            "param": None,
            "code": "upstream_disconnected",
        }
    }
