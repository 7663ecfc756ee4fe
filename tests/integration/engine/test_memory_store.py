"""Real instances over shared memory, alone and in front of files; some of them are killed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.digits import Reference, assert_same_tokens, shipped, user
from tests.support.engines import engine
from tests.support.epd_client import ask, ask_epd, ids, prime, rewritten
from tests.support.mounts import small_tmpfs
from tests.support.processes import Server, running

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """An encoder and a PD over `memory`, a tmpfs, and the volume behind it, if there is one."""

    encoder: Server
    pd: Server
    memory: Path
    volume: Path | None

    @property
    def arenas(self) -> list[Path]:
        return list(self.memory.rglob("*.arena"))

    def ask(self, messages: Messages, **fields: Any) -> httpx.Response:
        return ask_epd(self.encoder, self.pd, messages, **fields)


@pytest.fixture(scope="module", params=["memory", "tiers"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    volume = folder / "volume" if request.param == "tiers" else None
    with small_tmpfs(folder / "memory", 32 << 20) as memory:
        encoder = engine("encoder", folder, role="ec_producer", store=volume, memory=memory)
        pd = engine("pd", folder, role="ec_consumer", store=volume, memory=memory)
        with running(encoder, pd):
            yield Pair(encoder, pd, memory, volume)
        assert list(memory.rglob("*.arena")) == [], "instances that end take their memory along"


def question(angle: float) -> Messages:
    """A picture that no other test has sent, so that no cache holds it."""
    return [user(shipped("seven").rotate(angle), "What digit is this?")]


def test_answers_are_those_of_plain_transformers(pair: Pair, reference: Reference) -> None:
    for angle in (0.5, 1.5, 2.5):
        messages = question(angle)
        answer = pair.ask(messages, return_token_ids=True)
        assert_same_tokens(ids(answer), reference.generate(messages, 12))
    assert pair.pd.metric("epd_engine_ec_loads_total") == 3
    assert pair.pd.metric("epd_engine_encoder_items_total") == 0


def test_memory_that_is_lost_is_a_miss_or_served_by_the_files_and_never_a_dead_engine(pair: Pair) -> None:
    messages = question(11)
    primed = rewritten(messages, prime(pair.encoder, messages))
    for arena in pair.arenas:
        arena.unlink()
    answer = ask(pair.pd, primed)
    if pair.volume is None:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "ec_miss"
    else:
        assert answer.status_code == 200
    pair.pd.wait_ready()
    assert pair.ask(question(12)).status_code == 200, "an encoder whose arena was deleted makes another"
    assert pair.arenas


def test_a_killed_encoder_leaves_nothing_that_its_successor_does_not_sweep(pair: Pair) -> None:
    prime(pair.encoder, question(21))
    before = set(pair.arenas)
    pair.encoder.kill()
    pair.encoder.start()
    pair.encoder.wait_ready()
    assert pair.ask(question(22)).status_code == 200
    assert len(before - set(pair.arenas)) == 1


def test_metrics_say_what_went_through_which_tier(pair: Pair) -> None:
    before = pair.pd.metric("epd_engine_ec_load_bytes_total", tier="memory")
    assert pair.ask(question(41)).status_code == 200
    loaded = pair.pd.metric("epd_engine_ec_load_bytes_total", tier="memory") - before
    assert loaded > 0
    assert pair.encoder.metric("epd_engine_ec_save_bytes_total", tier="memory") >= loaded
    assert (pair.encoder.metric("epd_engine_ec_save_bytes_total", tier="storage") > 0) == bool(pair.volume)
