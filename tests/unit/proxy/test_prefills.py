"""What a prefill instance is asked, what it answers, and which instances do not fit."""

from __future__ import annotations

import json

import pytest

from epd_proxy.config import Origin
from epd_proxy.pairs import Pairs
from epd_proxy.pool import Instance
from epd_proxy.prefills import decode_doc, prefill_doc, read_prefill_answer

DOC = {
    "model": "digits",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 50,
    "min_tokens": 5,
    "n": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
}


def test_prefill_is_asked_for_one_token_that_is_not_streamed():
    before = json.dumps(DOC)
    assert prefill_doc(DOC) == {
        "model": "digits",
        "messages": DOC["messages"],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
        "temperature": 0.5,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert json.dumps(DOC) == before


@pytest.mark.parametrize("least", [0, 1, "x", None])
def test_a_min_tokens_that_fits_or_is_for_engines_to_refuse_stays(least):
    assert prefill_doc({**DOC, "min_tokens": least})["min_tokens"] == least


def test_decode_gets_the_clients_request_and_the_params():
    assert decode_doc(DOC, {"a": [1]}) == {**DOC, "kv_transfer_params": {"a": [1]}}


def answer(**fields) -> bytes:
    return json.dumps({"choices": [{"finish_reason": "length"}], **fields}).encode()


def test_params_are_read_as_they_are():
    params = {"do_remote_prefill": True, "remote_block_ids": [[3, 1]], "remote_host": "h", "x": None}
    assert read_prefill_answer(answer(kv_transfer_params=params)) == params


def test_an_answer_that_ended_with_its_first_token_needs_no_decode():
    ended = [{"finish_reason": "stop"}]
    assert read_prefill_answer(answer(choices=ended)) is None
    assert read_prefill_answer(answer(choices=ended, kv_transfer_params=None)) is None
    assert read_prefill_answer(answer(choices=ended, kv_transfer_params={"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        answer(),
        answer(kv_transfer_params={}),
        answer(kv_transfer_params="x"),
        answer(kv_transfer_params=[1], choices=[{"finish_reason": "stop"}]),
        answer(choices=[]),
        answer(choices="x"),
        answer(choices=[None]),
        answer(choices=[{"finish_reason": None}]),
    ],
)
def test_an_answer_without_params_is_malformed(body: bytes):
    with pytest.raises(ValueError, match=r"."):
        read_prefill_answer(body)


def instances(count: int) -> list[Instance]:
    return [Instance(Origin.parse(f"http://10.0.0.{n}:8000")) for n in range(count)]


def test_a_refused_pair_is_remembered_for_a_while():
    now = [0.0]
    pairs = Pairs(seconds=30, clock=lambda: now[0])
    (p, q), (d, e) = instances(2), instances(2)
    pairs.refused(p, d)
    assert pairs.unfit(p) == {d}
    assert pairs.unfit(q) == set()
    assert pairs.hopeless([p, q], [d, e]) == set()
    pairs.refused(p, e)
    assert pairs.hopeless([p, q], [d, e]) == {p}
    assert pairs.hopeless([p, q], [d]) == {p}
    assert pairs.hopeless([p, q], []) == set()
    now[0] = 30.0
    assert pairs.unfit(p) == set()


def test_an_instance_that_is_gone_is_forgotten():
    pairs = Pairs()
    (p,), decodes = instances(1), instances(2)
    for one in decodes:
        pairs.refused(p, one)
    kept = decodes.pop()
    del one, decodes
    assert pairs.unfit(p) == {kept}
