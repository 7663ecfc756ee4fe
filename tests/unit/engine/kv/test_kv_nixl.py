"""Pulls between two pools in this process: a real NIXL read, a real side channel, and peers that lie."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from epd_engine.attention.kv_cache import KVCache
from epd_engine.core.remote_kv import RemotePrefill
from epd_engine.kv_transfer import nixl_pool, puller
from epd_engine.kv_transfer.base import KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig
from epd_engine.kv_transfer.nixl_connector import NixlKVConnector, PullPlan
from epd_engine.kv_transfer.nixl_pool import PoolAgent, PullError, block_runs
from epd_engine.kv_transfer.pull_server import Ended, Offer, PullServer
from epd_engine.kv_transfer.puller import BlockPull, Puller, Source
from epd_engine.kv_transfer.side_channel import Channel
from tests.support.engine_objects import request
from tests.support.waiting import eventually

BLOCK = 4
IDENTITY = KVModelIdentity("f" * 64, torch.float32, BLOCK, 3, 2, 8, vocab_size=1000)
OFFER = Offer("p", "a" * 64, "digest", (7, 2, 3, 4))
MINE = (1, 5, 6, 0)


def pool(value: Callable[[torch.Tensor], torch.Tensor] = torch.rand_like) -> KVCache:
    cache = KVCache(
        num_layers=3,
        num_blocks=8,
        block_size=BLOCK,
        kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.layers = [(value(keys), value(values)) for keys, values in cache.layers]
    return cache


class Prefill:
    """A pool that is served, and what came of its offers."""

    def __init__(self, lease: float = 30.0, patience: float = 30.0):
        self.cache = pool()
        self.ended = Ended()
        self.server = PullServer(
            IDENTITY,
            PoolAgent(self.cache, IDENTITY),
            ("127.0.0.1", 0),
            lease_seconds=lease,
            pull_seconds=patience,
            on_progress=lambda: None,
        )
        self.source = Source("127.0.0.1", self.server.port, OFFER.transfer_id)

    def look(self) -> Ended:
        ended = self.server.take_ended()
        self.ended.pulled |= ended.pulled
        self.ended.unclaimed |= ended.unclaimed
        return self.ended

    def asked(self, **fields: Any) -> dict[str, Any]:
        whole = {"purpose": "pull", "transfer": OFFER.transfer_id, "digest": OFFER.digest, "first": 0}
        return {**whole, "compatibility": IDENTITY.compatibility, **fields}

    @contextlib.contextmanager
    def channel(self) -> Iterator[Channel]:
        with Channel(self.source.host, self.source.port, 10) as channel:
            yield channel


@contextlib.contextmanager
def serving(**limits: float) -> Iterator[Prefill]:
    prefill = Prefill(**limits)
    prefill.server.offer(OFFER)
    yield prefill
    prefill.server.close()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    with serving() as made:
        yield made


@pytest.fixture
def decode() -> Iterator[tuple[KVCache, Puller]]:
    cache = pool()
    made = Puller(IDENTITY, cache, pull_seconds=10)
    yield cache, made
    made.close()


def pull(prefill: Prefill, decode: Puller, **fields: Any) -> int:
    whole = {"request_id": "d", "source": prefill.source, "digest": OFFER.digest, "first": 0}
    wanted = BlockPull(**{**whole, "block_ids": MINE, "tokens_in_last": 3, **fields})
    return decode.pull(wanted, lambda: None).result(30)


def test_blocks_that_lie_in_a_row_on_both_sides_are_one_read() -> None:
    assert block_runs([4, 5, 6, 9, 1, 2], [0, 1, 3, 4, 7, 8]).tolist() == [
        [4, 0, 2],
        [6, 3, 1],
        [9, 4, 1],
        [1, 7, 2],
    ]
    assert block_runs([3], [5]).tolist() == [[3, 5, 1]]


@pytest.mark.parametrize("first", [0, 2])
def test_what_is_pulled_is_what_was_offered(
    prefill: Prefill, decode: tuple[KVCache, Puller], first: int
) -> None:
    """And nothing else is touched; what lies behind the prompt's end is another request's, and goes."""
    cache, made = decode
    before = [(keys.clone(), values.clone()) for keys, values in cache.layers]
    num_bytes = pull(prefill, made, first=first, block_ids=MINE[first:])
    assert num_bytes == (4 - first) * 3 * IDENTITY.layer_bytes_per_block
    untouched = [block for block in range(8) if block not in MINE[first:]]
    for mine, theirs, old in zip(cache.layers, prefill.cache.layers, before, strict=True):
        for got, wanted, was in zip(mine, theirs, old, strict=True):
            assert torch.equal(got[list(MINE[first:-1])], wanted[list(OFFER.block_ids[first:-1])])
            assert torch.equal(got[MINE[-1], :, :3], wanted[OFFER.block_ids[-1], :, :3])
            assert not got[MINE[-1], :, 3:].any()
            assert torch.equal(got[untouched], was[untouched])
    assert prefill.look() == Ended(pulled={"p": 4 - first})
    with pytest.raises(PullError, match="not there any more"):
        pull(prefill, made)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"digest": "other"}, "another prompt's"),
        ({"transfer": "b" * 64}, "not there any more"),
        ({"transfer": None}, "not there any more"),
        ({"first": 4}, "no such blocks"),
        ({"first": True}, "no such blocks"),
        ({"purpose": "look"}, "neither a pull nor a drop"),
        ({"compatibility": None}, "neither a pull nor a drop"),
        ({"compatibility": {**IDENTITY.compatibility, "block_size": 8}}, "block size is 8 there and 4 here"),
        ({"compatibility": {**IDENTITY.compatibility, "layout": "x"}}, "layout is 'x' there"),
    ],
)
def test_pulls_that_do_not_fit_are_refused_with_the_reason(
    prefill: Prefill, decode: tuple[KVCache, Puller], fields: dict[str, Any], said: str
) -> None:
    with prefill.channel() as channel, pytest.raises(PullError, match=said):
        channel.ask(prefill.asked(**fields), 10)
    pull(prefill, decode[1])


def test_a_transfer_is_pulled_by_one_at_a_time(prefill: Prefill, decode: tuple[KVCache, Puller]) -> None:
    """One that goes away in the middle leaves it to the next."""
    with prefill.channel() as channel:
        assert channel.ask(prefill.asked(), 10)["blocks"] == list(OFFER.block_ids)
        with pytest.raises(PullError, match="another instance is pulling it"):
            pull(prefill, decode[1])

    def comes_through() -> bool:
        with contextlib.suppress(PullError):
            return pull(prefill, decode[1]) > 0
        return False

    eventually(comes_through)
    assert prefill.look() == Ended(pulled={"p": 4})


def test_blocks_are_free_at_the_end_of_their_lease() -> None:
    with serving(lease=0.2) as prefill:
        eventually(lambda: "nobody came" in prefill.look().unclaimed.get("p", ""))
        with prefill.channel() as channel, pytest.raises(PullError, match="not there any more"):
            channel.ask(prefill.asked(), 10)


def test_a_lease_waits_for_a_pull_but_not_for_one_that_stands_still() -> None:
    with serving(lease=0.2, patience=1.0) as prefill, prefill.channel() as channel:
        channel.ask(prefill.asked(), 10)
        time.sleep(0.5)
        assert prefill.look() == Ended()
        eventually(lambda: "while it was being pulled" in prefill.look().unclaimed.get("p", ""))
        with pytest.raises(PullError, match="broke off"):
            channel.ask({"done": True}, 10)


def test_what_was_withdrawn_during_a_pull_is_not_confirmed(prefill: Prefill) -> None:
    with prefill.channel() as channel:
        channel.ask(prefill.asked(), 10)
        prefill.server.withdraw(OFFER.transfer_id)
        with pytest.raises(PullError, match="given to others"):
            channel.ask({"done": True}, 10)
    assert prefill.look() == Ended(), "its blocks were nobody's already"


def test_a_request_that_ended_before_frees_the_blocks(
    prefill: Prefill, decode: tuple[KVCache, Puller]
) -> None:
    decode[1].drop(prefill.source)
    eventually(lambda: "ended before" in prefill.look().unclaimed.get("p", ""))


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, struct.pack(">I", 2) + b"[]", struct.pack(">I", 1) + b"{", b"GET / HTTP/1.1\r\n", b""],
)
def test_garbage_ends_its_connection_alone(
    prefill: Prefill, decode: tuple[KVCache, Puller], garbage: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", prefill.source.port), 10) as peer:
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(100) == b""
    pull(prefill, decode[1])


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"blocks": [1], "view": {}},
        {"blocks": [1, 2, 3, -4], "view": {}},
        {"blocks": [1, 2, 3, 4], "view": {"agent": "x"}},
        {
            "blocks": [1, 2, 3, 4],
            "view": {"agent": "x", "metadata": "?", "memory": "DRAM", "device": 0, "bases": []},
        },
        {
            "blocks": [1, 2, 3, 4],
            "view": {"agent": "x", "metadata": "", "memory": "DRAM", "device": 0, "bases": [1]},
        },
        {
            "blocks": [1, 2, 3, 4],
            "view": {"agent": "x", "metadata": "bm9uZQ==", "memory": "DRAM", "device": 0, "bases": [64] * 6},
        },
        {"refused": "no"},
    ],
    ids=range(8),
)
def test_a_prefill_that_answers_nonsense_is_a_failed_pull(
    prefill: Prefill, decode: tuple[KVCache, Puller], answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "ask", lambda *_: answer)
        with pytest.raises(PullError):
            pull(prefill, decode[1])
    pull(prefill, decode[1])


def test_nobody_there_is_a_failed_pull(prefill: Prefill, decode: tuple[KVCache, Puller]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PullError, match=f"cannot be reached at 127.0.0.1:{port}"):
        pull(prefill, decode[1], source=Source("127.0.0.1", port, "a" * 64))


def test_prefills_that_come_and_go_leave_nothing_behind(
    decode: tuple[KVCache, Puller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a decode instance holds does not grow with the prefill instances that it has met."""
    monkeypatch.setattr(puller, "MAX_PEERS", 3)
    process, held = psutil.Process(), []
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            prefill = stack.enter_context(serving())
            before = process.num_fds()
            pull(prefill, decode[1])
            held.append(process.num_fds() - before)
    assert sum(held) < 12, "one for each peer at most; both sides are in one process here"


def test_one_connection_serves_pulls_one_after_the_other(
    prefill: Prefill, decode: tuple[KVCache, Puller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread it is: making an agent takes longer than many reads."""
    monkeypatch.setattr(puller, "PoolAgent", None)
    for _ in range(2 * puller.THREADS):
        pull(prefill, decode[1])
        prefill.server.offer(OFFER)


def test_a_preempted_requests_prompt_comes_back_from_a_copy() -> None:
    """Its blocks are another's by then; what it had generated is not in the copy."""
    config = KVTransferConfig("NixlKVConnector", "kv_consumer")
    chosen = NixlKVConnector(config, KVConnectorRole.SCHEDULER, IDENTITY)
    worker = NixlKVConnector(config, KVConnectorRole.WORKER, IDENTITY)
    cache = pool()
    worker.register_kv_caches(cache)
    wanted = [(keys[[3, 4, 5]].clone(), values[[3, 4, 5]].clone()) for keys, values in cache.layers]
    made = request("d", 10)
    made.kv = RemotePrefill("p", "a" * 64, 10, 1, connector={"host": "127.0.0.1", "port": 1})

    def step() -> set[str]:
        plan = PullPlan()
        plan, chosen._plan = chosen._plan, plan
        worker.bind_connector_metadata(plan)
        worker.start_load_kv()
        return worker.get_finished().finished_recving

    made.block_ids[:] = [3, 4, 5]
    chosen.request_preempted(made)
    step()
    for keys, values in cache.layers:
        keys.fill_(9)
        values.fill_(9)
    made.block_ids[:] = [1, 0, 7]
    assert chosen.get_num_new_matched_tokens(made, 4) == 6
    chosen.update_state_after_alloc(made, 6)
    assert step() == {"d"}
    for got, kept in zip(cache.layers, wanted, strict=True):
        for part, was in zip(got, kept, strict=True):
            assert torch.equal(part[0], was[1])
            assert torch.equal(part[7, :, :2], was[2, :, :2])
            assert not part[7, :, 2:].any()
            assert (part[1] == 9).all(), "this one was known here"
    chosen.request_finished(made, completed=True)
    step()
    assert worker._copies == {}
    worker.shutdown()


def test_configs_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(extra: dict[str, Any] | None = None, **fields: Any) -> None:
        config = KVTransferConfig(
            "NixlKVConnector", "kv_both", kv_connector_extra_config=extra or {}, **fields
        )
        NixlKVConnector(config, KVConnectorRole.WORKER, IDENTITY).register_kv_caches(pool())

    with pytest.raises(KVConfigError, match="'lease_seconds' must be more than 0"):
        start({"lease_seconds": 0})
    with pytest.raises(KVConfigError, match="key 'backend'; known are lease_seconds, pull_seconds"):
        start({"backend": "UCX"})
    with pytest.raises(KVConfigError, match="kv_port must be a port"):
        start(kv_port=70000)
    with pytest.raises(KVConfigError, match="kv_buffer_device is 'cuda', and the KV lies on 'cpu'"):
        start(kv_buffer_device="cuda")
    with pytest.raises(KVConfigError, match=r"kv_ip 192\.0\.2\.1, kv_port 0: "):
        start(kv_ip="192.0.2.1")
    monkeypatch.setattr(nixl_pool, "_MODULES", ("no.such.module",))
    with pytest.raises(KVConfigError, match="install the extra `nixl`"):
        start()
