"""The load generator: chats that are all different, sent to a server or, in two hops, to an encoder and a PD
or to prefill and decode.

The two hops are the proxy's work, done here for every peer alike, so that no proxy is measured.
"""

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from engine_instances import NAME, Instance
from PIL import Image

QUESTION = "What is in this picture?"
WORDS = (
    "red",
    "square",
    "blue",
    "circle",
    "green",
    "triangle",
    "white",
    "ground",
    "darker",
    "larger",
    "louder",
)


@dataclass
class Target:
    """`encoder` is None where the server takes pictures itself, `prefill` where it computes prompts."""

    server: Instance
    encoder: Instance | None = None
    prefill: Instance | None = None

    @property
    def instances(self) -> list[Instance]:
        return [one for one in (self.encoder, self.prefill, self.server) if one is not None]


@dataclass
class Timings:
    """Seconds: to the first token of each request, those of them since prefill's answer, and between the
    tokens of each."""

    first: list[float] = field(default_factory=list)
    handover: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


class Chats:
    """Endless, and no two alike; JPEG keeps the client's own work small."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def image(self, side: int) -> Image.Image:
        """Coarse noise: as much to encode as any picture."""
        small = self._random.integers(0, 256, (side // 8, side // 8, 3), "uint8")
        return Image.fromarray(small).resize((side, side), Image.Resampling.NEAREST)

    def words(self, count: int = 24) -> str:
        return " ".join(self._random.choice(WORDS, count))

    def text(self, tokens: int, words: int = 24) -> dict[str, Any]:
        return self._body(f"{self.words(words)}. How many things can be seen?", tokens)

    def picture(self, side: int, tokens: int) -> dict[str, Any]:
        buffer = io.BytesIO()
        self.image(side).save(buffer, "JPEG", quality=90)
        url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        return self._body(parts, tokens)

    def another_question(self, asked: dict[str, Any]) -> dict[str, Any]:
        """About the picture of `asked`, as it comes in a conversation's next turn."""
        picture, _ = asked["messages"][0]["content"]
        content = [picture, {"type": "text", "text": f"{self.words()}. {QUESTION}"}]
        return self._body(content, asked["max_tokens"])

    def _body(self, content: Any, tokens: int) -> dict[str, Any]:
        return {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Client:
    """`timings` grows with every answer that has come to its end."""

    def __init__(self, target: Target):
        self._target = target
        self._http = httpx.AsyncClient(timeout=600)
        self.timings = Timings()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, body: dict[str, Any]) -> None:
        """Raises `RuntimeError` unless every token that was asked for has come."""
        began = last = time.perf_counter()
        if self._target.encoder is not None:
            body = await self._primed(self._target.encoder, body)
        if self._target.prefill is not None:
            body = await self.prefill(body)
        handed_on = time.perf_counter()
        first, between, tokens = float("nan"), [], 0
        async for event, now in self._events(body):
            if first != first:
                first = now - began
            elif '"finish_reason"' in event:
                between.append(now - last)
            last = now
            if f'"completion_tokens":{body["max_tokens"]}' in event.replace(" ", ""):
                tokens = body["max_tokens"]
        if tokens != body["max_tokens"]:
            raise RuntimeError(f"{self._target.server.name}: an answer is too short")
        self.timings.first.append(first)
        self.timings.handover.append(first - (handed_on - began))
        self.timings.between += between[1:]  # the role and the first token come together

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[tuple[str, float]]:
        url = f"{self._target.server.url}/v1/chat/completions"
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{self._target.server.name}: {(await response.aread()).decode()[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield line, time.perf_counter()

    async def _primed(self, encoder: Instance, body: dict[str, Any]) -> dict[str, Any]:
        """The body for a PD, once the encoder has published its pictures."""
        (message,) = body["messages"]
        if isinstance(message["content"], str):
            return body
        pictures = [part for part in message["content"] if part["type"] != "text"]
        primer = {"model": NAME, "messages": [{"role": "user", "content": pictures}], "max_tokens": 1}
        response = await self._http.post(f"{encoder.url}/v1/chat/completions", json=primer)
        if response.status_code != 200:
            raise RuntimeError(f"{encoder.name}: {response.text[:500]}")
        for key, said in response.json()["ec_transfer_params"].items():
            for index in said["item_indices"]:
                pictures[index] = {"type": "image_embeds", "image_embeds": said["metadata"], "uuid": key}
        texts = [part for part in message["content"] if part["type"] == "text"]
        return {**body, "messages": [{"role": "user", "content": [*pictures, *texts]}]}

    async def prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body for decode, once prefill has its first token."""
        prefill = self._target.prefill
        assert prefill is not None
        asked = {name: value for name, value in body.items() if name != "stream_options"}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        response = await self._http.post(f"{prefill.url}/v1/chat/completions", json=asked)
        if response.status_code != 200:
            raise RuntimeError(f"{prefill.name}: {response.text[:500]}")
        return {**body, "kv_transfer_params": response.json()["kv_transfer_params"]}


async def requests(
    target: Target, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[Timings, float]:
    """All of `bodies`, so many in flight; and the seconds it took."""
    gate = asyncio.Semaphore(concurrency)
    async with Client(target) as client:

        async def one(body: dict[str, Any]) -> None:
            async with gate:
                await client.ask(body)

        began = time.perf_counter()
        await asyncio.gather(*(one(body) for body in bodies))
        return client.timings, time.perf_counter() - began


@dataclass(frozen=True)
class Mixture:
    """Text chats one after another over some connections, while every `interval` seconds something heavy
    comes, whether or not the last one is done: a picture, or a prompt of so many words."""

    texts: int = 4
    text_tokens: int = 48
    side: int = 896
    words: int = 700
    heavy_tokens: int = 4
    interval: float = 2.0


async def beside_pictures(target: Target, mixture: Mixture, chats: Chats, seconds: float) -> Timings:
    """How the text chats fared."""
    return await _beside(
        target, mixture, chats, seconds, lambda: chats.picture(mixture.side, mixture.heavy_tokens)
    )


async def beside_prompts(target: Target, mixture: Mixture, chats: Chats, seconds: float) -> Timings:
    """How the text chats fared."""
    return await _beside(
        target, mixture, chats, seconds, lambda: chats.text(mixture.heavy_tokens, mixture.words)
    )


async def _beside(
    target: Target, mixture: Mixture, chats: Chats, seconds: float, heavy: Callable[[], dict[str, Any]]
) -> Timings:
    until = time.perf_counter() + seconds
    all_heavy = [heavy() for _ in range(int(seconds / mixture.interval) + 1)]
    async with Client(target) as texts, Client(target) as others, asyncio.TaskGroup() as group:

        async def chatting() -> None:
            while time.perf_counter() < until:
                await texts.ask(chats.text(mixture.text_tokens))

        for _ in range(mixture.texts):
            group.create_task(chatting())
        for one in all_heavy:
            group.create_task(others.ask(one))
            await asyncio.sleep(mixture.interval)
    return texts.timings
