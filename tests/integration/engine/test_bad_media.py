"""Bad pictures over HTTP: an OpenAI error body, a metric, and the server goes on."""

import base64
from typing import Any

import httpx
import pytest

from tests.support.digits import bytes_url, shipped, user
from tests.support.epd_client import ask, prime, text
from tests.support.processes import Server
from tests.unit.engine.test_media import (
    animated_gif,
    bomb,
    encoded,
    exif_rotated,
    gradient,
    palette_with_alpha,
    sixteen_bit,
)


def picture(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


BAD = {
    "not an image": bytes_url(b"hello"),
    "0 bytes": bytes_url(b""),
    "a bomb": bytes_url(bomb()),
    "a truncated JPEG": bytes_url(encoded(gradient(), "JPEG")[:300]),
    "broken base64": "data:image/png;base64,@@@@",
    "a file": "file:///etc/hostname",
    "a private address": "http://127.0.0.1:1/x.png",
    "cloud metadata": "http://169.254.169.254/latest/",
    "no URL at all": "seven",
    "an extreme aspect ratio": bytes_url(encoded(gradient().resize((3000, 1)))),
}
GOOD = {
    "CMYK": bytes_url(encoded(gradient("CMYK"), "JPEG")),
    "16 bit": bytes_url(sixteen_bit()),
    "palette with alpha": bytes_url(palette_with_alpha()),
    "animated": bytes_url(animated_gif(), "image/gif"),
    "EXIF rotated": bytes_url(exif_rotated()),
    "one pixel": bytes_url(encoded(gradient().resize((1, 1)))),
    "a wrong type in the URL": bytes_url(encoded(gradient(), "JPEG"), "image/png"),
}


@pytest.fixture(params=["encoder", "aggregated"])
def server(request: pytest.FixtureRequest, instances: dict[str, Server]) -> Server:
    return instances[request.param]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_gets_400_with_its_place(server: Server, name: str) -> None:
    before = server.metric("epd_engine_requests_total", status="400")
    answer = ask(server, picture(BAD[name]))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert error["message"].startswith(error["param"])
    assert error["type"] == "invalid_request_error"
    assert server.metric("epd_engine_requests_total", status="400") == before + 1
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("name", GOOD)
def test_an_unusual_picture_is_taken(server: Server, name: str) -> None:
    assert ask(server, picture(GOOD[name]), max_tokens=1).status_code == 200


def test_one_bad_picture_among_good_ones_is_the_one_that_is_named(server: Server) -> None:
    messages = [user(shipped("seven"), "and", shipped("three"))]
    messages[0]["content"].insert(2, {"type": "image_url", "image_url": {"url": BAD["not an image"]}})
    answer = ask(server, messages)
    assert answer.json()["error"]["param"] == "messages[0].content[2].image_url.url"


def test_after_all_that_answers_are_right(encoder: Server, aggregated: Server) -> None:
    assert prime(encoder, [user(shipped("seven"))])
    assert text(ask(aggregated, [user(shipped("seven"), "What digit is this?")]))


def test_huge_base64_is_refused_with_413(encoder: Server) -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(33 << 20)).decode()
    answer = ask(encoder, picture(url))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "media_too_large"
