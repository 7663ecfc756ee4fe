"""What the proxy does, in a few plain lines, for tests of the engine's wire contract without it."""

import copy
from typing import Any

import httpx

from tests.support.engines import MODEL_NAME
from tests.support.processes import Server

MODALITIES = {"image_url": "image", "audio_url": "audio", "input_audio": "audio"}


def ask(server: Server, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def media_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] != "text"
    ]


def prime(encoder: Server, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Primes every item; returns the parts that stand for them on a PD, in order."""
    items = media_parts(messages)
    answer = ask(encoder, [{"role": "user", "content": items}], max_tokens=1)
    assert answer.status_code == 200, answer.text
    parts: list[dict[str, Any]] = [{}] * len(items)
    for key, said in answer.json()["ec_transfer_params"].items():
        for index in said["item_indices"]:
            kind = f"{MODALITIES[items[index]['type']]}_embeds"
            parts[index] = {"type": kind, kind: said["metadata"], "uuid": key}
    return parts


def rewritten(messages: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with `parts` in place of their media."""
    out, queue = copy.deepcopy(messages), list(parts)
    for message in out:
        if isinstance(message["content"], list):
            message["content"] = [p if p["type"] == "text" else queue.pop(0) for p in message["content"]]
    return out


def ask_epd(encoder: Server, pd: Server, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    if not media_parts(messages):
        return ask(pd, messages, **fields)
    return ask(pd, rewritten(messages, prime(encoder, messages)), **fields)
