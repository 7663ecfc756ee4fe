"""Requests per second and latency of the proxy on one core, in front of scripted engines.

    python benchmarks/proxy.py                                 # ours alone
    python benchmarks/proxy.py --peer-proxy disagg_epd_proxy.py  # and vLLM's example proxy, in turns

The proxy under test has one core to itself; the load generator and the engines share another. The engines
answer at once from fixed bytes, and every picture is new, so that no cache of ours helps. Rounds of ours and
of the peer alternate, and the median round counts, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

MB = 1_000_000
ROUNDS = 3
PEER = "vLLM example proxy"
TARGET = 1.0


@dataclass(frozen=True)
class Scenario:
    """One measured load: a picture of so many bytes (0: text only) over so many connections."""

    name: str
    picture: int
    connections: int
    unit: str

    def read(self, latencies: list[float], seconds: float) -> float:
        """The value of one round."""
        if self.unit == "ms":
            return statistics.median(latencies) * 1000
        return len(latencies) / seconds

    def ratio(self, ours: float, peer: float) -> float:
        return peer / ours if self.unit == "ms" else ours / peer


SCENARIOS = [
    Scenario("text, 16 connections", 0, 16, "requests/s"),
    Scenario("text, 1 connection, median", 0, 1, "ms"),
    Scenario("picture of 1 MB, 4 connections", MB, 4, "requests/s"),
    Scenario("picture of 8 MB, 4 connections", 8 * MB, 4, "requests/s"),
]


class Messages(asyncio.Protocol):
    """The HTTP messages of one connection, found by their content-length and otherwise unread."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            at = self._head.lower().find(b"content-length:", 0, end)
            length = int(self._head[at + 15 : self._head.find(b"\r\n", at)]) if at >= 0 else 0
            self._missing = end + 4 + length - len(self._head)
        if self._missing == 0:
            head, self._head = self._head, b""
            self.message(head)

    def message(self, head: bytes) -> None:
        raise NotImplementedError


def http_answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def completion(content: str, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    return {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage, **more}


def engine(answer: bytes) -> type[Messages]:
    class Engine(Messages):
        def message(self, head: bytes) -> None:
            self.transport.write(answer)

    return Engine


def run_engines(ports: tuple[int, int], core: int) -> None:
    """An encoder and a PD in this process, for ever."""
    os.sched_setaffinity(0, {core})
    entry = {"item_indices": [0], "metadata": {"image_grid_thw": [1, 36, 36]}}
    primed = completion("", ec_transfer_params={"ab" * 32: entry})

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for port, answer in zip(ports, (primed, completion("seven")), strict=True):
            await loop.create_server(engine(http_answer(json.dumps(answer).encode())), "127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(serve())


class Client(Messages):
    """One connection that sends its next request when the last one is answered, until `until`."""

    def __init__(self, next_request: Callable[[], list[bytes]], until: float) -> None:
        super().__init__()
        self.latencies: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next = next_request
        self._until = until

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send()

    def send(self) -> None:
        self._sent = time.perf_counter()
        self.transport.writelines(self._next())

    def message(self, head: bytes) -> None:
        now = time.perf_counter()
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(head.decode(errors="replace")))
        elif now >= self._until:
            self.done.set_result(None)
            self.transport.close()
        else:
            self.latencies.append(now - self._sent)
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"connection lost: {exc}"))


def requests(scenario: Scenario) -> Callable[[], list[bytes]]:
    """Makes the pieces of the next request; every picture differs in its first bytes."""
    text = {"type": "text", "text": "What digit is this?"}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,PICTURE"}}
    content = [text, picture] if scenario.picture else [text]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    before, _, after = json.dumps(body).encode().partition(b"PICTURE")
    pixels = base64.b64encode(os.urandom(scenario.picture))[16:] if scenario.picture else b""
    serial = itertools.count()
    size = len(before) + len(after) + (len(pixels) + 16 if scenario.picture else 0)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    before = head + b"content-length: %d\r\n\r\n" % size + before

    def next_request() -> list[bytes]:
        if not pixels:
            return [before]
        return [before, b"%016d" % next(serial), pixels, after]

    return next_request


async def load(scenario: Scenario, port: int, seconds: float) -> list[float]:
    """Latencies in seconds of all requests answered in time."""
    make, until = requests(scenario), time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(make, until), "127.0.0.1", port))[1]
        for _ in range(scenario.connections)
    ]
    await asyncio.gather(*(client.done for client in clients))
    return [latency for client in clients for latency in client.latencies]


def measure(scenario: Scenario, ports: dict[str, int], rounds: int, seconds: float) -> dict[str, float]:
    """The median round of each target, the targets taking turns."""
    values: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            uvloop.run(load(scenario, port, seconds / 5))  # warm
            values[name].append(scenario.read(uvloop.run(load(scenario, port, seconds)), seconds))
    return {name: statistics.median(rounds_) for name, rounds_ in values.items()}


@contextlib.contextmanager
def proxy_process(command: list[str], port: int, core: int) -> Iterator[None]:
    """A proxy pinned to `core`, from its first answer on /health until the end of the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
        try:
            for _ in range(300):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace"))
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run(peer: Path | None, rounds: int, seconds: float) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the proxy, one for load and engines")
    proxy_core, load_core = cores[:2]
    encoder, pd, our_port, peer_port = free_ports(4)
    os.sched_setaffinity(0, {load_core})
    engines = multiprocessing.Process(target=run_engines, args=((encoder, pd), load_core), daemon=True)
    engines.start()
    e, d = f"http://127.0.0.1:{encoder}", f"http://127.0.0.1:{pd}"
    ours = [sys.executable, "-c", "from epd_proxy.cli import main; main()", "--encoder", e, "--pd", d]
    ports = {"ours": our_port}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(engines.terminate)
        stack.enter_context(proxy_process([*ours, "--port", str(our_port)], our_port, proxy_core))
        if peer is not None:
            flags = ["--encode-servers-urls", e, "--decode-servers-urls", d, "--host", "127.0.0.1"]
            command = [sys.executable, str(peer), *flags, "--port", str(peer_port)]
            stack.enter_context(proxy_process(command, peer_port, proxy_core))
            ports[PEER] = peer_port
        for scenario in SCENARIOS:
            rows.append(row(scenario, measure(scenario, ports, rounds, seconds)))
            print_row(rows[-1])
    return rows


def row(scenario: Scenario, values: dict[str, float]) -> dict[str, Any]:
    ours, peer = values["ours"], values.get(PEER)
    return {
        "name": scenario.name,
        "value": ours,
        "unit": scenario.unit,
        "peer": None if peer is None else PEER,
        "peer_value": peer,
        "ratio": None if peer is None else scenario.ratio(ours, peer),
        "target": None if peer is None else TARGET,
    }


def print_row(row: dict[str, Any]) -> None:
    line = f"{row['name']:<32} {row['value']:>9.2f} {row['unit']:<11}"
    if row["peer"]:
        line += f" {row['peer_value']:>9.2f}  ratio {row['ratio']:.2f} (target {row['target']:g})"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-proxy", type=Path, help="vLLM's disagg_epd_proxy.py, run where it lies")
    parser.add_argument("--quick", action="store_true", help="shorter rounds: less than a minute in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    print(f"{'':<32} {'ours':>9} {'':<11} {PEER if arguments.peer_proxy else ''}")
    rows = run(arguments.peer_proxy, ROUNDS, 1.5 if arguments.quick else 6.0)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
