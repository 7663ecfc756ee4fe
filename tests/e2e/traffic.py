"""Requests that come one after another, from as many clients as a load takes."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
from PIL import Image

from tests.support.digits import shipped, user
from tests.support.engines import MODEL_NAME

PATIENCE_S = 120.0  # for one answer, beside pods that start
NUMBERS = itertools.count()


def new_picture() -> Image.Image:
    """A seven like no other: nobody has encoded it yet."""
    picture = shipped("seven")
    number = next(NUMBERS)
    picture.putpixel((0, 0), (number >> 16 & 255, number >> 8 & 255, number & 255))
    return picture


def ask_about_pictures(client: httpx.Client, *, pictures: int) -> None:
    """An answer of one token, so that nearly all of the work is the encoder's."""
    question = user(*(new_picture() for _ in range(pictures)), "What digits are these?")
    answer = client.post("/v1/chat/completions", json=_body([question], 1))
    assert answer.status_code == 200, answer.text


def ask_for_tokens(client: httpx.Client, *, tokens: int) -> None:
    """A streamed answer to a few words, which arrives whole."""
    body = _body([user(f"Count to {next(NUMBERS)}.")], tokens) | {"ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.read()
    assert answer.status_code == 200, answer.text
    *_, last, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]", answer.text[-1000:]
    (choice,) = json.loads(last.removeprefix("data: "))["choices"]
    assert choice["finish_reason"] == "length", last


def _body(messages: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": tokens, "temperature": 0}


class Traffic:
    """What became of a load's requests."""

    def __init__(self) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def run(self, url: str, ask: Callable[[httpx.Client], None]) -> None:
        """One client, until told to stop."""
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    ask(client)
                    self.answered += 1
                except (AssertionError, KeyError, ValueError, httpx.TransportError) as error:
                    self.failures.append(repr(error))


@contextmanager
def traffic(url: str, ask: Callable[..., None], *, clients: int, **how: int) -> Iterator[Traffic]:
    """So many clients ask while inside; all that they have asked is answered afterwards."""
    made = Traffic()
    threads = [threading.Thread(target=made.run, args=(url, partial(ask, **how))) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        made.stop()
        for thread in threads:
            thread.join()
