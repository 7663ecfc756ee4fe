"""What an encoder answers, and what is remembered of it."""

from __future__ import annotations

import json

import pytest

from epd_proxy.encoders import NotPublished, read_primer_answer
from epd_proxy.media import Primed
from epd_proxy.primers import Recent

A, B = "a" * 64, "b" * 64
GRID = {"image_grid_thw": [1, 2, 2]}


def answer(params) -> bytes:
    return json.dumps({"ec_transfer_params": params}).encode()


def test_answers_are_put_in_the_order_of_the_items():
    params = {B: {"item_indices": [1], "metadata": {}}, A: {"item_indices": [2, 0], "metadata": GRID}}
    assert read_primer_answer(answer(params), 3) == [Primed(A, GRID), Primed(B, {}), Primed(A, GRID)]


def test_absent_metadata_is_empty_metadata():
    assert read_primer_answer(answer({A: {"item_indices": [0]}}), 1) == [Primed(A, {})]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        answer(None),
        answer([]),
        answer({A: []}),
        answer({A: {"metadata": GRID}}),
        answer({A: {"item_indices": 0, "metadata": GRID}}),
        answer({A: {"item_indices": ["0"], "metadata": GRID}}),
        answer({A: {"item_indices": [True], "metadata": GRID}}),
        answer({A: {"item_indices": [-1], "metadata": GRID}}),
        answer({A: {"item_indices": [1], "metadata": GRID}}),
        answer({A: {"item_indices": [0, 0], "metadata": GRID}}),
        answer({A: {"item_indices": [0]}, B: {"item_indices": [0]}}),
        answer({A: {"item_indices": [0], "metadata": [1]}}),
        answer({"../x": {"item_indices": [0], "metadata": GRID}}),
        answer({"": {"item_indices": [0], "metadata": GRID}}),
    ],
)
def test_a_malformed_answer_is_a_value_error(body):
    with pytest.raises(ValueError):
        read_primer_answer(body, 1)


@pytest.mark.parametrize(("params", "found"), [({}, 0), ({A: {"item_indices": [1], "metadata": GRID}}, 1)])
def test_an_item_that_is_left_out_was_not_published(params, found):
    with pytest.raises(NotPublished, match=f"only {found} of 2"):
        read_primer_answer(answer(params), 2)


def test_recent_answers_expire():
    now = [100.0]
    recent = Recent(seconds=10, clock=lambda: now[0])
    recent.put(b"k", Primed(A, GRID))
    now[0] = 109.9
    assert recent.get(b"k") == Primed(A, GRID)
    now[0] = 110.0
    assert recent.get(b"k") is None


def test_the_least_recently_used_answer_goes_first():
    recent = Recent(size=2, clock=lambda: 0.0)
    recent.put(b"1", Primed(A, GRID))
    recent.put(b"2", Primed(A, GRID))
    assert recent.get(b"1") is not None
    recent.put(b"3", Primed(A, GRID))
    assert [recent.get(key) is not None for key in (b"1", b"2", b"3")] == [True, False, True]


def test_a_dropped_answer_is_gone():
    recent = Recent()
    recent.put(b"1", Primed(A, GRID))
    recent.drop(b"1")
    recent.drop(b"2")
    assert recent.get(b"1") is None
