"""One volume on two nodes: producer and consumer see it at different paths, each with mounts of its own.

Two mount namespaces over one file system, and two clients of a loopback NFS export where this machine's
kernel has NFS; the latter with caches of their own, as two nodes have.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.mounts import small_tmpfs
from tests.support.nfs import NfsUnavailable, exported, mounted
from tests.support.store_audit import store
from tests.support.store_peer import ITEMS, RemotePeer, peer
from tests.support.waiting import eventually

GID = 54000
PRODUCER, CONSUMER = 54001, 54002  # users

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and users need root")


@dataclass
class Nodes:
    """A volume as the test sees it, and an instance on each of two nodes that see it elsewhere."""

    volume: Path
    producer: RemotePeer
    consumer: RemotePeer


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with TemporaryDirectory(prefix="epd-nodes-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


@pytest.fixture(scope="module", params=["one file system", "NFS"])
def nodes(request: pytest.FixtureRequest, home: Path) -> Iterator[Nodes]:
    home = home / request.param.split()[-1]
    home.mkdir()
    with small_tmpfs(home / "volume", 32 << 20) as volume:
        os.chown(volume, 0, GID)
        volume.chmod(0o2770)
        if request.param == "NFS":
            try:
                with exported(volume), mounted(volume, home / "a") as a, mounted(volume, home / "b") as b:
                    yield from _nodes(volume, home, a, b)
            except NfsUnavailable as problem:
                pytest.skip(f"no NFS on this machine: {problem}")
        else:
            yield from _nodes(volume, home, volume, volume)


def _nodes(volume: Path, home: Path, a: Path, b: Path) -> Iterator[Nodes]:
    here, there = home / "producer" / "ec", home / "consumer" / "mnt" / "store"
    with (
        peer("ec_producer", here, uid=PRODUCER, gid=GID, volumes={a: here}) as producer,
        peer("ec_consumer", there, uid=CONSUMER, gid=GID, volumes={b: there}) as consumer,
    ):
        yield Nodes(volume, producer, consumer)


def test_what_one_node_has_answered_for_the_other_loads_at_once(nodes: Nodes) -> None:
    for n in range(30):
        assert nodes.consumer.ask("look_up", n) == {n: "missing"}, "and this may be remembered"
        assert nodes.producer.ask("encode", n) == {n: "saved"}
        assert nodes.consumer.ask("load", n) == {n: "exact"}


def test_a_step_of_several_items_arrives_as_a_whole(nodes: Nodes) -> None:
    several = list(range(100, 112))
    assert set(nodes.producer.ask("encode", *several).values()) == {"saved"}
    assert set(nodes.consumer.ask("look_up", *several).values()) == {"there"}
    assert set(nodes.consumer.ask("load", *several).values()) == {"exact"}


def test_a_lease_on_one_node_keeps_the_entry_from_a_janitor_on_the_other(nodes: Nodes) -> None:
    assert nodes.producer.ask("encode", 1, 2) == {1: "saved", 2: "saved"}
    assert nodes.consumer.ask("look_up", 1) == {1: "there"}
    _wait_for(nodes.producer, [1, 2], lambda: nodes.consumer.ask("load", 1, 2))
    assert nodes.consumer.ask("look_up", 1) == {1: "there"}  # leased again; 2 is not
    everything = ("--capacity", "1000", "--grace", "0")
    assert store("gc", nodes.volume, *everything)["entries"] == 1
    assert nodes.consumer.ask("load", 1) == {1: "exact"}
    assert "no entry" in nodes.consumer.ask("load", 2)[2]
    assert nodes.producer.ask("encode", 2) == {2: "saved"}
    assert nodes.consumer.ask("load", 2) == {2: "exact"}


def _wait_for(producer: RemotePeer, numbers: list[int], load: Callable[[], object]) -> None:
    """Loads, and returns once the producer on the other node has heard of all of it."""
    wanted = {ITEMS[n].mm_hash for n in numbers}
    load()
    heard: set[str] = set()

    def all_heard() -> bool:
        heard.update(producer.ask("acknowledged"))
        return wanted <= heard

    eventually(all_heard, 30)


def test_an_entry_is_the_groups_on_either_node(nodes: Nodes) -> None:
    nodes.producer.ask("encode", 5)
    (entry,) = nodes.volume.glob(f"*/{ITEMS[5].mm_hash}/*")
    status = entry.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (PRODUCER, GID, 0o660)
    before = status.st_mtime_ns
    subprocess.run(["touch", "-d", "2020-01-01", str(entry)], check=True)
    assert nodes.consumer.ask("load", 5) == {5: "exact"}
    assert entry.stat().st_mtime_ns > before - 10**12, "the consumer, another user, has marked it as used"
