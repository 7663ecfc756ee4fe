"""Questions about pictures, and what a deployment answers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.support.digits import data_url
from tests.support.processes import Server
from tests.support.waiting import eventually

TOKENS = 8


@dataclass(frozen=True)
class Deployment:
    """Its instances; `front` is the proxy."""

    model: Path
    store: Path
    encoder: Server
    pd: Server
    front: Server
    aggregated: Server

    def entries(self) -> list[Path]:
        """The store's entries, oldest first."""
        return sorted(
            self.store.glob("*/*/encoder_cache.safetensors"), key=lambda path: path.stat().st_mtime_ns
        )


_seeds = iter(range(1, 1_000_000))


def picture(width: int = 112, height: int = 112, seed: int | None = None) -> str:
    """A picture of noise as a data URL; a new one at each call where no seed is given."""
    rng = np.random.default_rng(next(_seeds) if seed is None else seed)
    return data_url(Image.fromarray(rng.integers(0, 256, (height, width, 3), "uint8")))


def question(*urls: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in this picture?"}]}]


@dataclass(frozen=True)
class Answer:
    """`text` of what came; `code` of the error, where there is one."""

    status: int
    text: str
    code: object = None


def ask(
    server: Server, model: Path | str, messages: list[dict[str, Any]], *, stream: bool = False, **fields: Any
) -> Answer:
    body = {
        "model": str(model),
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    if response.status_code != 200:
        return Answer(response.status_code, "", response.json()["error"].get("code"))
    if not stream:
        return Answer(200, response.json()["choices"][0]["message"]["content"])
    text, code = "", None
    for event in _events(response.text):
        if "error" in event:
            code = event["error"].get("code", "unknown")
        else:
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return Answer(200, text, code)


def prime(encoder: Server, model: Path | str, *urls: str) -> list[dict[str, Any]]:
    """Parts for a PD, as an encoder's answer has them."""
    messages = question(*urls)
    body = {"model": str(model), "messages": messages, "max_tokens": 1, "stream": False}
    response = httpx.post(f"{encoder.url}/v1/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    parts: list[dict[str, Any]] = [{}] * len(urls)
    for key, said in response.json()["ec_transfer_params"].items():
        for index in said["item_indices"]:
            parts[index] = {"type": "image_embeds", "image_embeds": said["metadata"], "uuid": key}
    return parts


def until_metric(server: Server, name: str, value: float) -> None:
    """Waits until a sample has this value: vLLM's metrics follow an answer by a moment."""
    eventually(lambda: server.metric(name) == value)


def about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The same question with parts in the place of pictures."""
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is in this picture?"}]}]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
