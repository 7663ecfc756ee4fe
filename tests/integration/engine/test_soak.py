"""Two minutes of random traffic with clients that hang up, on two deployments with little room at once.

An aggregated server, and an encoder and a PD over shared memory behind the proxy. KV memory, encoder cache
and store are so small that requests are preempted and pictures evicted all the time. Afterwards nothing may
be held, and memory may not have grown. `EPD_SOAK_SECONDS=1200 pytest <this file>` is a real soak.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.conversations import Conversations, described
from tests.support.engines import MODEL_NAME, engine, proxy
from tests.support.mounts import small_tmpfs
from tests.support.processes import Server, running
from tests.support.waiting import eventually

SECONDS = float(os.environ.get("EPD_SOAK_SECONDS", "120"))
SEED = int(os.environ.get("EPD_SOAK_SEED", "5"))
WARM_SHARE = 0.4  # of the time, until everything that grows once has grown
CLIENTS = 10
CHATS_PER_SEED = 30  # then come other pictures
GROWTH, GROWTH_BYTES = 1.15, 24 << 20  # what an allocator may keep

MEDIA = ["--max-encoder-embeds", "32", "--encoder-cache-size", "64"]
TEXT = [
    *("--max-model-len", "384", "--kv-cache-tokens", "512"),
    *("--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
]
AT_REST = (
    "integrity_problems",
    "kv_cache_usage_ratio",
    "encoder_cache_referenced_embeddings",
    "encoder_cache_aside_embeddings",
)
# What a deployment with so little room may say: its queue is full, or a picture has left the store before
# its answer began.
EXPECTED = {(429, "queue_full"), (503, "ec_miss")}


@dataclass
class Deployment:
    """`entry` is what clients talk to; `answers` counts outcomes."""

    name: str
    entry: Server
    engines: list[Server]
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def resident(self) -> dict[str, int]:
        """Bytes, by instance."""
        return {server.name: psutil.Process(server.pid).memory_info().rss for server in self.engines}

    def logs(self) -> str:
        return "\n".join(server.log.read_text() for server in self.engines)


@pytest.fixture
def deployments(tmp_path: Path) -> Iterator[list[Deployment]]:
    with small_tmpfs(tmp_path / "memory", 16 << 20) as memory:
        shared: dict[str, Any] = {"memory": memory, "capacity": 512 << 10}
        alone = engine("aggregated", tmp_path, extra=[*MEDIA, *TEXT])
        encoder = engine("encoder", tmp_path, role="ec_producer", extra=MEDIA, **shared)
        pd = engine("pd", tmp_path, role="ec_consumer", extra=[*MEDIA[2:], *TEXT], **shared)
        entry = proxy(tmp_path, [encoder], [pd])
        with running(alone, encoder, pd, entry):
            yield [Deployment("aggregated", alone, [alone]), Deployment("1E+1PD", entry, [encoder, pd])]
        assert list(memory.rglob("*.arena")) == [], "instances that end take their memory along"


@pytest.mark.timeout(SECONDS + 600)
async def test_random_traffic_leaves_nothing_behind(deployments: list[Deployment]) -> None:
    await traffic(deployments, SECONDS * WARM_SHARE, SEED)
    before = [deployment.resident() for deployment in deployments]
    await traffic(deployments, SECONDS * (1 - WARM_SHARE), SEED + 1_000_000)
    for deployment, warm in zip(deployments, before, strict=True):
        print(deployment.name, dict(deployment.answers), warm, deployment.resident())
        check_answers(deployment)
        assert deployment.entry.exit_code is None, deployment.entry.name
        for server in deployment.engines:
            check_at_rest(server)
        for name, resident in deployment.resident().items():
            assert resident < warm[name] * GROWTH + GROWTH_BYTES, f"{name}: {warm[name]} to {resident} bytes"
    crowded(deployments)


async def traffic(deployments: list[Deployment], seconds: float, seed: int) -> None:
    """Clients of every deployment until the time is up, and then until their last request has ended."""
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for deployment in deployments:
            for number in range(CLIENTS):
                group.create_task(client(deployment, until, seed + 1000 * number))


async def client(deployment: Deployment, until: float, seed: int) -> None:
    chance = random.Random(seed)
    async with httpx.AsyncClient(base_url=deployment.entry.url, timeout=120) as http:
        for number in range(1_000_000):
            if time.monotonic() > until:
                return
            if number % CHATS_PER_SEED == 0:
                chats = Conversations(seed + number)
            body = random_body(chats, chance)
            patience = chance.uniform(0, 1.0) if chance.random() < 0.3 else 120
            try:
                async with asyncio.timeout(patience):
                    outcome = await ask(http, body)
            except TimeoutError:
                outcome = "hung up" if patience < 120 else "no answer"
            deployment.answers[outcome.split(":")[0]] += 1
            if outcome.split(":")[0] not in ("answered", "hung up", "expected"):
                deployment.wrong.append(f"{outcome}\n{described(body['messages'])}")


def random_body(chats: Conversations, chance: random.Random) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "messages": chats.one(),
        "max_tokens": chance.randint(1, 48),
        "ignore_eos": True,
        "stream": chance.random() < 0.5,
        "stream_options": {"include_usage": True},
        "temperature": chance.choice((0, 1.0)),
        "seed": chance.randint(0, 1000),
        "n": chance.choice((1, 1, 1, 2)),
        "priority": chance.choice((0, 0, 1)),
    }


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """What came of it; a good answer has as many tokens as were asked for."""
    if not body["stream"]:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        raw = (await response.aread()).decode()
    if response.status_code != 200:
        code = httpx.Response(response.status_code, text=raw).json()["error"].get("code")
        known = (response.status_code, code) in EXPECTED
        return f"{'expected' if known else 'refused'}: {response.status_code} {raw[:300]}"
    wanted = body["n"] * body["max_tokens"]
    if f'"completion_tokens":{wanted},' in raw.replace(" ", "").replace("}", ","):
        return "answered"
    return f"cut off, {wanted} tokens are missing: {raw[-400:]}"


def check_answers(deployment: Deployment) -> None:
    shown = "\n".join(deployment.wrong[:5])
    assert not deployment.wrong, f"{deployment.name}: {len(deployment.wrong)} are wrong, such as\n{shown}"
    answers = deployment.answers
    assert answers["answered"] > 20, f"{deployment.name}: {answers}"
    assert answers["hung up"] > 5, f"{deployment.name}: {answers}"
    assert answers["expected"] < 0.05 * answers.total(), f"{deployment.name}: {answers}"


def check_at_rest(server: Server) -> None:
    """Alive, and holding nothing: what clients left behind may take a step or two to be let go."""
    assert server.exit_code is None, server.name
    eventually(lambda: server.metric("epd_engine_requests_running") == 0)
    eventually(lambda: server.metric("epd_engine_requests_waiting") == 0)
    for name in AT_REST:
        eventually(lambda name=name: server.metric(f"epd_engine_{name}") == 0)  # type: ignore[misc]
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    assert "do not balance" not in log


def crowded(deployments: list[Deployment]) -> None:
    """The test is worth something: there was too little room for all, and pictures came more than once."""
    for deployment in deployments:
        assert "preempted for lack of KV blocks" in deployment.logs(), deployment.name
    for server in (deployment.engines[0] for deployment in deployments):
        assert server.metric("epd_engine_encoder_embeddings_total") > 640, "ten times the encoder cache"
