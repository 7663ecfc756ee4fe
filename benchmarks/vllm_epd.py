"""vLLM 1E+1PD behind our connector and proxy, against its own file connector and example proxy, in one run.

    python benchmarks/vllm_epd.py --peer-proxy disagg_epd_proxy.py [--quick] [--json FILE]

The peer's proxy is run where it lies, in vLLM's source distribution
(`examples/disaggregated/disaggregated_encoder`). Both sides run the same vLLM with the same flags, stores on
one tmpfs, and get the same pictures of 448x448, four at a time, each asked about once, and then each once
more; they take turns, the other one stopped in its tracks.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine_load
from engine_instances import BIN, Instance, Peers, alone, started, vllm
from make_model import make
from report import Row, print_table, write_json

from tests.support.vllm import ENGINE, process_environment, vllm_python

SIDE, TOKENS, CONCURRENCY = 448, 8, 4
SIZE = "small"
PEER = "vLLM's connector and proxy"
TARGET_RATE, TARGET_TTFT = 1.2, 1.0


@dataclass
class Side:
    """An encoder, a PD and the proxy before them. `sent` is in kB, of one request, from the proxy to both."""

    encoder: Instance
    pd: Instance
    proxy: Instance
    rates: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    sent: float = float("nan")

    @property
    def instances(self) -> tuple[Instance, ...]:
        return self.encoder, self.pd, self.proxy


def engine(peers: Peers, name: str, role: str, connector: str, store: Path) -> Instance:
    """vLLM in a role, with one of the two file connectors."""
    base = vllm(peers, SIZE)
    config: dict[str, Any] = {
        "ec_connector": connector,
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    }
    environment = dict(base.environment)
    if connector == "EPDStoreConnector":
        config["ec_connector_module_path"] = "epd_engine.vllm.connector"
        environment["PYTHONPATH"] = str(ENGINE)
    command = [*base.command, "--ec-transfer-config", json.dumps(config)]
    return Instance(name, command, environment, "/health", peers.folder / f"{name.replace(' ', '-')}.log")


def our_proxy(peers: Peers, encoder: str, pd: str) -> Instance:
    command = [str(BIN / "epd-proxy"), "--host", "127.0.0.1", "--encoder", encoder, "--pd", pd]
    return Instance("our proxy", command, process_environment(), "/ready", peers.folder / "our-proxy.log")


def peer_proxy(peers: Peers, program: Path, encoder: str, pd: str) -> Instance:
    flags = ["--host", "127.0.0.1", "--encode-servers-urls", encoder, "--decode-servers-urls", pd]
    command = [str(peers.vllm), str(program), *flags]
    return Instance(
        "vLLM's proxy", command, process_environment(), "/health", peers.folder / "peer-proxy.log"
    )


class Relay:
    """A TCP port that passes everything on to a server, and counts what goes there."""

    def __init__(self, url: str):
        self._port = int(url.rsplit(":", 1)[1])
        self.sent = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pass(reader, to, count=True), self._pass(there, writer, count=False))
        except OSError:
            pass  # one side has hung up
        finally:
            to.close()
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        while data := await reader.read(1 << 16):
            self.sent += len(data) if count else 0
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def bytes_sent(side: Side, proxy_of: Any, body: dict[str, Any]) -> float:
    """kB that a proxy sends to encoder and PD for one request, its probes included."""
    encoder, pd = Relay(side.encoder.url), Relay(side.pd.url)
    async with encoder as encoder_url, pd as pd_url:
        proxy = proxy_of(encoder_url, pd_url)
        try:
            await asyncio.to_thread(proxy.start)
            before = encoder.sent + pd.sent
            await engine_load.requests(engine_load.Target(proxy), [body], 1)
            return (encoder.sent + pd.sent - before) / 1e3
        finally:
            await asyncio.to_thread(proxy.stop)


def measure(side: Side, bodies: list[dict[str, Any]], follow_ups: list[dict[str, Any]]) -> None:
    """One round of a side."""
    target = engine_load.Target(side.proxy)
    timings, seconds = asyncio.run(engine_load.requests(target, bodies, CONCURRENCY))
    side.rates.append(len(bodies) / seconds)
    side.first += timings.first
    _, seconds = asyncio.run(engine_load.requests(target, follow_ups, CONCURRENCY))
    side.again.append(len(follow_ups) / seconds)


@contextmanager
def sides(peers: Peers, program: Path) -> Iterator[tuple[Side, Side]]:
    """Ours and the peer's, started and stopped in their tracks."""
    pairs = []
    for name, connector in (("ours", "EPDStoreConnector"), ("peer", "ECExampleConnector")):
        store = peers.memory / name
        store.mkdir()
        encoder = engine(peers, f"{name} encoder", "ec_producer", connector, store)
        pairs.append((encoder, engine(peers, f"{name} pd", "ec_consumer", connector, store)))
    with ExitStack() as stack:
        stack.enter_context(started([one for pair in pairs for one in pair]))
        proxies = [
            our_proxy(peers, pairs[0][0].url, pairs[0][1].url),
            peer_proxy(peers, program, pairs[1][0].url, pairs[1][1].url),
        ]
        for proxy, pair in zip(proxies, pairs, strict=True):
            with alone(*pair):
                stack.enter_context(started([proxy]))
        yield Side(*pairs[0], proxy=proxies[0]), Side(*pairs[1], proxy=proxies[1])


def run(program: Path, count: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        peers = Peers(Path(folder), Path(memory), threads=1, vllm=vllm_python())
        make(peers.model(SIZE), "qwen2_5_vl", SIZE)
        chats = engine_load.Chats()
        with sides(peers, program) as (ours, peer):
            for each in range(rounds + 1):
                bodies = [chats.picture(SIDE, TOKENS) for _ in range(count)]
                follow_ups = [chats.another_question(body) for body in bodies]
                for side in (ours, peer):
                    with alone(*side.instances):
                        measure(side, bodies, follow_ups)
                    if each == 0:  # to warm up
                        side.rates.clear()
                        side.again.clear()
                        side.first.clear()
            body = chats.picture(SIDE, TOKENS)
            with alone(ours.encoder, ours.pd):
                ours.sent = asyncio.run(bytes_sent(ours, lambda e, pd: our_proxy(peers, e, pd), body))
            with alone(peer.encoder, peer.pd):
                peer.sent = asyncio.run(
                    bytes_sent(peer, lambda e, pd: peer_proxy(peers, program, e, pd), body)
                )
        return rows(ours, peer)


def rows(ours: Side, peer: Side) -> list[Row]:
    def ttft(side: Side, share: float) -> float:
        return statistics.quantiles(side.first, n=100)[int(share * 100) - 1] * 1e3

    rate, theirs = statistics.median(ours.rates), statistics.median(peer.rates)
    again, theirs_again = statistics.median(ours.again), statistics.median(peer.again)
    return [
        Row("pictures of 448x448, 4 at a time", rate, "requests/s", PEER, theirs, TARGET_RATE),
        Row("asked about once more", again, "requests/s", PEER, theirs_again),
        Row("TTFT, median", ttft(ours, 0.5), "ms", PEER, ttft(peer, 0.5)),
        Row("TTFT, p99", ttft(ours, 0.99), "ms", PEER, ttft(peer, 0.99), TARGET_TTFT),
        Row("sent by the proxy, a request", ours.sent, "kB", PEER, peer.sent),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-proxy", type=Path, required=True, help="vLLM's disagg_epd_proxy.py")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    if not chosen.peer_proxy.exists():
        sys.exit(f"{chosen.peer_proxy} is not there")
    result = run(chosen.peer_proxy.resolve(), *((16, 2) if chosen.quick else (48, 5)))
    print_table(result)
    if chosen.json:
        write_json(result, chosen.json)


if __name__ == "__main__":
    main()
