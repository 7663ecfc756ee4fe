"""Token parity with plain transformers, through E -> store -> PD and on the aggregated server."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.digits import Reference, assert_same_tokens, shipped, user
from tests.support.epd_client import ask, ask_epd, ids
from tests.support.processes import Server

Ask = Callable[..., httpx.Response]


def noise(width: int, height: int, seed: int) -> Image.Image:
    import numpy as np

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), "uint8")
    return Image.fromarray(pixels)


SEVEN, THREE = shipped("seven"), shipped("three")
CASES: dict[str, list[dict[str, Any]]] = {
    "no picture": [{"role": "user", "content": "Hello, who are you?"}],
    "one picture": [user(SEVEN, "What digit is this?")],
    "two pictures": [user(SEVEN, THREE, "What digits are these?")],
    "the same two in the other order": [user(THREE, SEVEN, "What digits are these?")],
    "text around them": [user("First ", SEVEN, " then ", THREE, " - what digits are these?")],
    "two adjacent, nothing else": [user(SEVEN, THREE)],
    "the same picture twice": [user(SEVEN, SEVEN, "What digits are these?")],
    "pictures of different sizes": [user(noise(30, 150, 1), noise(200, 61, 2), noise(9, 9, 3), "And these?")],
    "several turns": [
        {"role": "system", "content": "You read digits."},
        user(SEVEN, "What digit is this?"),
        {"role": "assistant", "content": "seven"},
        user("And this one?", THREE),
    ],
}


@pytest.fixture(params=["epd", "aggregated"])
def serve(request: pytest.FixtureRequest, instances: dict[str, Server]) -> Ask:
    if request.param == "aggregated":
        return lambda messages, **fields: ask(instances["aggregated"], messages, **fields)
    return lambda messages, **fields: ask_epd(instances["encoder"], instances["pd"], messages, **fields)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_transformers(serve: Ask, reference: Reference, name: str) -> None:
    wanted = reference.generate(CASES[name], 12)
    answer = serve(CASES[name], return_token_ids=True)
    assert_same_tokens(ids(answer), wanted)
    assert answer.json()["prompt_token_ids"] == wanted.prompt_ids
    assert answer.json()["usage"]["prompt_tokens"] == len(wanted.prompt_ids)


def test_sixteen_mixed_requests_in_flight_at_once(serve: Ask, reference: Reference) -> None:
    mixed = [*CASES.values()][:8]
    mixed += [[user(noise(20 + 13 * i, 120 - 7 * i, i), "What digit is this?")] for i in range(8)]
    with ThreadPoolExecutor(len(mixed)) as pool:
        answers = list(pool.map(lambda messages: serve(messages, return_token_ids=True), mixed))
    for messages, answer in zip(mixed, answers, strict=True):
        assert_same_tokens(ids(answer), reference.generate(messages, 12))


def test_what_the_model_says_depends_on_the_picture(serve: Ask) -> None:
    said = {name: ids(serve(CASES[name], return_token_ids=True)) for name in list(CASES)[1:4]}
    assert len({tuple(tokens) for tokens in said.values()}) == 3
