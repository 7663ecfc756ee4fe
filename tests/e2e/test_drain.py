"""Instances told to end while they work: nothing that has begun is lost, and nobody waits for ever."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.engine.test_parity import noise
from tests.support.digits import shipped, user
from tests.support.engines import MODEL_NAME, engine, proxy
from tests.support.epd_client import ask
from tests.support.kv_client import ask_prefill, handed_on, nixl_flags
from tests.support.processes import Server, running
from tests.support.waiting import eventually

STREAMS = 50
TOKENS = 150
DONE = b"data: [DONE]\n\n"
NEVER = "600"  # seconds; longer than the test may take


class Fleet:
    """An encoder and two PDs behind a proxy; one PD has all the time it may need to end, one has a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.store.mkdir()
        self.encoder = engine("encoder", folder, role="ec_producer", store=self.store)
        self.patient, self.hasty = self.pds = [self.pd("patient", NEVER), self.pd("hasty", "1")]
        self.entry = proxy(folder, [self.encoder], self.pds, extra=["--drain-timeout", NEVER])

    def pd(self, name: str, drain: str) -> Server:
        limits = ["--max-num-seqs", "64", "--kv-cache-tokens", "16384", "--drain-timeout", drain]
        return engine(name, self.folder, role="ec_consumer", store=self.store, extra=limits)

    def up(self) -> None:
        """Brings back what a test has ended, and waits until the proxy knows it."""
        servers = [self.encoder, *self.pds, self.entry]
        for server in servers:
            if server.exit_code is not None:
                server.start()
        for server in servers:
            server.wait_ready()
        eventually(lambda: b'"ready":false' not in httpx.get(f"{self.entry.url}/ready").content)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("drain"))
    with running(fleet.encoder, *fleet.pds, fleet.entry):
        yield fleet


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    started.up()
    return started


class Stream:
    """One streamed answer: begun once its first bytes are here."""

    def __init__(self, server: Server, tokens: int, content: str = "Count.") -> None:
        self.body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.url = f"{server.url}/v1/chat/completions"
        self.begun = asyncio.Event()
        self.received = b""

    async def run(self, client: httpx.AsyncClient) -> None:
        async with client.stream("POST", self.url, json=self.body, timeout=300) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for piece in answer.aiter_raw():
                self.received += piece
                self.begun.set()

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = self.received.removesuffix(DONE).split(b"\n\n")
        return [json.loads(line.removeprefix(b"data: ")) for line in lines if line]

    @property
    def num_tokens(self) -> int:
        return sum(len(choice["token_ids"]) for event in self.events for choice in event.get("choices", ()))

    @property
    def is_whole(self) -> bool:
        return self.received.endswith(DONE)

    @property
    def last_error(self) -> str | None:
        error: str | None = self.events[-1].get("error", {}).get("code")
        return error


@asynccontextmanager
async def in_flight(streams: list[Stream]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """All have begun inside, and have ended afterwards."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
        tasks = [asyncio.create_task(stream.run(client)) for stream in streams]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        yield tasks
        await asyncio.gather(*tasks)


async def ended(server: Server) -> int:
    return await asyncio.to_thread(server.wait)


async def test_fifty_streams_survive_the_end_of_one_of_two_pds(fleet: Fleet) -> None:
    leaving, staying = fleet.patient, fleet.hasty
    streams = [Stream(fleet.entry, TOKENS, f"Count to {index}.") for index in range(STREAMS)]
    async with in_flight(streams) as tasks:
        shares = [pd.metric("epd_engine_requests_running") for pd in fleet.pds]
        assert min(shares) > 0, "both are at work when one is told to end"
        leaving.signal(signal.SIGTERM)
        assert not any(task.done() for task in tasks)
        # What comes now is the other one's, from the first request on.
        picture = [user(shipped("seven"), "What digit is this?")]
        later = [asyncio.to_thread(ask, fleet.entry, picture) for _ in range(4)]
        assert {answer.status_code for answer in await asyncio.gather(*later)} == {200}
    assert await ended(leaving) == 0
    assert [stream.num_tokens for stream in streams if stream.is_whole] == [TOKENS] * STREAMS
    assert staying.exit_code is None


@pytest.mark.parametrize("name", ["pd", "proxy"])
async def test_a_second_sigterm_ends_streams_with_an_error_event(fleet: Fleet, name: str) -> None:
    ending = fleet.entry if name == "proxy" else fleet.patient
    # Directly, and through the proxy.
    streams = [Stream(server, 2000) for server in {ending, fleet.entry} for _ in range(4)]
    async with in_flight(streams) as tasks:
        ending.signal(signal.SIGTERM)
        await asyncio.to_thread(eventually, lambda: refuses(ending))
        assert not any(task.done() for task in tasks)
        ending.signal(signal.SIGTERM)
        assert await ended(ending) == 0
    cut = [stream for stream in streams if not stream.is_whole]
    assert {stream.last_error for stream in cut} == {"shutting_down"}
    assert len(cut) >= 4


async def test_the_deadline_ends_streams_with_an_error_event_and_frees_the_process(fleet: Fleet) -> None:
    streams = [Stream(fleet.hasty, 2000) for _ in range(16)]
    async with in_flight(streams):
        fleet.hasty.signal(signal.SIGTERM)
    assert await ended(fleet.hasty) == 0
    cut = [stream for stream in streams if not stream.is_whole]
    assert {stream.last_error for stream in cut} == {"shutting_down"}


def test_an_encoder_publishes_what_it_took_before_it_ends(fleet: Fleet) -> None:
    pictures = [[noise(400, 400, 7000 + 10 * index + at) for at in range(4)] for index in range(24)]
    with ThreadPoolExecutor(len(pictures)) as pool:
        calls = [pool.submit(ask, fleet.encoder, [user(*four)], max_tokens=1) for four in pictures]
        wait(calls, return_when=FIRST_COMPLETED)
        fleet.encoder.signal(signal.SIGTERM)
        assert not all(call.done() for call in calls), "it is told to end at work"
    assert fleet.encoder.wait() == 0
    # What came too late was not taken.
    taken = [call.result() for call in calls if not isinstance(call.exception(), httpx.TransportError)]
    assert len(taken) >= 2
    assert [answer.status_code for answer in taken] == [200] * len(taken)
    keys = [key for answer in taken for key in answer.json()["ec_transfer_params"]]
    assert len(keys) == 4 * len(taken)
    assert all(list(fleet.store.glob(f"*/{key}/encoder_cache.safetensors")) for key in keys)


async def test_a_prefill_stays_until_what_it_has_promised_is_pulled(tmp_path: Path) -> None:
    flags = ["--drain-timeout", NEVER, *nixl_flags("kv_producer", lease_seconds=float(NEVER))]
    prefill = engine("prefill", tmp_path, extra=flags)
    decode = engine("decode", tmp_path, extra=nixl_flags("kv_consumer"))
    messages = [{"role": "user", "content": "Count to nine."}]
    with running(prefill, decode):
        params = handed_on(ask_prefill(prefill, messages))
        prefill.signal(signal.SIGTERM)
        eventually(lambda: refuses(prefill))
        assert prefill.exit_code is None
        answer = ask(decode, messages, kv_transfer_params=params)
        assert answer.status_code == 200, answer.text
        assert prefill.wait() == 0


def refuses(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/health", timeout=5)
    except httpx.ConnectError:
        return True
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return False  # it was in the queue when the door closed
    return False
