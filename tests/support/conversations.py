"""Random chats with and without pictures, the same for the same seed, and how a failed test shows one."""

import base64
import hashlib
import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.support.digits import user

Messages = list[dict[str, Any]]

QUESTIONS = (
    "What digit is this?",
    "Which of these is larger, and by how much?",
    "Describe it.",
    "Compare the two and say how they differ, in a few words, please.",
    "Hello, who are you?",
    "One, two, three, four, five, six, seven. What comes next?",
)
ANSWERS = ("seven", "It is a three.", "I cannot tell.", "They are the same.")
SIDES = (28, 56, 84, 112, 61, 99)


def noise(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), "uint8")
    return Image.fromarray(pixels)


class Conversations:
    """Pictures come from a pool of `pictures`, so that some are repeated within a chat and across chats."""

    def __init__(self, seed: int, pictures: int = 24):
        self._random = random.Random(seed)
        self._pool = [
            noise(self._random.choice(SIDES), self._random.choice(SIDES), seed * 1000 + n)
            for n in range(pictures)
        ]

    def take(self, count: int) -> list[Messages]:
        return [self.one() for _ in range(count)]

    def one(self) -> Messages:
        """Text alone, a picture, adjacent ones, one twice, pictures between words, or some turns of these."""
        messages: Messages = []
        if self._random.random() < 0.3:
            messages.append({"role": "system", "content": "You read digits."})
        for _ in range(self._random.choice((0, 0, 0, 1, 2))):
            messages += [self._turn(), {"role": "assistant", "content": self._random.choice(ANSWERS)}]
        return [*messages, self._turn()]

    def picture(self) -> Image.Image:
        return self._random.choice(self._pool)

    def _turn(self) -> dict[str, Any]:
        text, one, other = self._random.choice(QUESTIONS), self.picture(), self.picture()
        forms: Sequence[tuple[str | Image.Image, ...]] = (
            (text,),
            (one, text),
            (text, one),
            (one, other, text),
            (one, one, text),
            ("First ", one, " then ", other, " - " + text),
            (one, other),
        )
        return user(*self._random.choice(forms))


def described(messages: Sequence[dict[str, Any]]) -> str:
    """The chat on some lines, its pictures by size and the beginning of their hash."""
    return "\n".join(f"    {message['role']}: {_content(message['content'])}" for message in messages)


def _content(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return repr(content)
    return " ".join(repr(part["text"]) if part["type"] == "text" else _picture(part) for part in content)


def _picture(part: dict[str, Any]) -> str:
    data = base64.b64decode(part["image_url"]["url"].split(",", 1)[1])
    width, height = Image.open(io.BytesIO(data)).size
    return f"<picture {width}x{height} {hashlib.sha256(data).hexdigest()[:8]}>"
