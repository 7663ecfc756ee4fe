"""Prefill and decode apart: what the handover costs, and what running chats gain by it.

    python benchmarks/pd.py [--quick] [--only handover,beside] [--json FILE]

Random weights of 108 million parameters in bfloat16, 12 KiB of KV for a token; a thread for each process.

  handover   from prefill's answer to decode's first token, for prompts of several lengths, one at a time,
             with both connectors, against memcpy of as many bytes (NIXL) or a write and a read of them
             (files, on a tmpfs); the rate of the loads alone; and a prefill that hands its KV on against one
             that does not
  beside     text chats while long prompts arrive: prefill and decode with a thread each, against one server
             with two
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from report import Row, latency_rows, print_table, write_json
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_instances import Instance, Peers, alone, ours, started
from engine_load import Chats, Client, Mixture, Target, Timings, beside_prompts
from make_model import make

MODEL = "100m"
WORDS = (40, 160, 640)  # of the prompts whose KV is handed over
PARTS = ("handover", "beside")
CHUNKS = ("--max-num-batched-tokens", "256")
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


@dataclass(frozen=True)
class Extent:
    """How much is measured: requests of each length, rounds and seconds of chats in each."""

    requests: int
    rounds: int
    seconds: float


FULL, QUICK = Extent(requests=20, rounds=3, seconds=20), Extent(requests=4, rounds=1, seconds=8)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end what was started
    options = arguments()
    extent = QUICK if options.quick else FULL
    with ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-pd-", dir=directory)))
            for directory in (None, options.memory)
        )
        peers = Peers(folder, memory, 1, None)
        logging.disable_progress_bar()
        make(peers.model(MODEL), "qwen2_5_vl", MODEL, dtype=torch.bfloat16)
        rows: list[Row] = []
        for name, connector in connectors(memory).items():
            pair = split(peers, connector)
            with started(pair.instances):
                if "handover" in options.only:
                    rows += handover(name, pair, memory, extent)
                if "beside" in options.only and name == "NIXL":
                    rows += beside(peers, pair, extent)
    print_table(rows)
    if options.json:
        write_json(rows, options.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few requests: about a minute")
    parser.add_argument(
        "--only", type=_parts, default=frozenset(PARTS), metavar="PART,...", help=", ".join(PARTS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--memory", type=Path, default="/dev/shm", metavar="DIR", help="on a tmpfs")
    return parser.parse_args()


def connectors(memory: Path) -> dict[str, dict[str, object]]:
    """Configs but for the role."""
    files = {"shared_storage_path": str(memory / "kv")}
    return {
        "files": {"kv_connector": "SharedStorageKVConnector", "kv_connector_extra_config": files},
        "NIXL": {"kv_connector": "NixlKVConnector"},
    }


def split(peers: Peers, connector: dict[str, object]) -> Target:
    """Prefill and decode, which share the model and nothing else."""

    def one(role: str) -> Instance:
        flags = ["--kv-transfer-config", json.dumps({**connector, "kv_role": role})]
        made = ours(peers, MODEL, extra=[*CHUNKS, *flags])
        made.name = f"{connector['kv_connector']} {role}"
        made.log = peers.folder / f"{connector['kv_connector']}-{role}.log"
        return made

    return Target(one(CONSUMER), prefill=one(PRODUCER))


def handover(name: str, pair: Target, memory: Path, extent: Extent) -> list[Row]:
    print(f"handover by {name}", flush=True)
    with alone(*pair.instances):
        asyncio.run(ask_all(pair, [Chats(99).text(2, WORDS[-1])] * 3))
        rows = [row for words in WORDS for row in of_length(name, pair, memory, extent, words)]
        return [*rows, overlap(name, pair, extent)]


def of_length(name: str, pair: Target, memory: Path, extent: Extent, words: int) -> list[Row]:
    """Prompts of so many words. What the loads are held against was measured just then."""
    before = loaded(pair.server)
    timings = asyncio.run(ask_all(pair, [Chats(words + n).text(2, words) for n in range(extent.requests)]))
    num_bytes, seconds = (now - was for now, was in zip(loaded(pair.server), before, strict=True))
    moved = int(num_bytes / extent.requests)
    whole, load = ("write and read", "read") if name == "files" else ("memcpy", "memcpy")
    took = statistics.median(timings.handover)
    what = f"{name}, {moved / 1e6:.3g} MB"
    return [
        Row(
            f"{what}: prefill's answer to decode's first token",
            took * 1000,
            "ms",
            whole,
            least(whole, moved, memory) * 1000,
        ),
        Row(
            f"{what}: load", num_bytes / seconds / 1e9, "GB/s", load, moved / least(load, moved, memory) / 1e9
        ),
    ]


def overlap(name: str, pair: Target, extent: Extent) -> Row:
    """The longest prompt on prefill alone: with its KV handed on, and without."""
    assert pair.prefill is not None
    times: dict[bool, list[float]] = {True: [], False: []}
    for n in range(extent.requests):
        for hands_on in (True, False):
            body = Chats(7000 + 2 * n + hands_on).text(1, WORDS[-1])
            began = time.perf_counter()
            if hands_on:
                asyncio.run(prefill_only(pair, body))
            else:
                asyncio.run(ask_all(Target(pair.prefill), [body]))
            times[hands_on].append(time.perf_counter() - began)
    mine, peer = (statistics.median(times[hands_on]) * 1000 for hands_on in (True, False))
    return Row(f"{name}: prefill that hands its KV on", mine, "ms", "one that does not", peer)


def beside(peers: Peers, pair: Target, extent: Extent) -> list[Row]:
    """Two threads for both forms."""
    print("text chats beside long prompts", flush=True)
    whole = Target(ours(peers, MODEL, threads=2, extra=CHUNKS))
    between: dict[str, list[float]] = {"split": [], "whole": []}
    first: dict[str, list[float]] = {"split": [], "whole": []}
    with started(whole.instances):
        for turn in range(-1, extent.rounds):
            for name, target in (("whole", whole), ("split", pair)):
                seconds = 4 if turn < 0 else extent.seconds
                with alone(*target.instances):
                    timings = asyncio.run(beside_prompts(target, Mixture(), Chats(turn + 7), seconds))
                if turn >= 0:
                    between[name] += timings.between
                    first[name] += timings.first
    rows = []
    for label, times in (("between tokens", between), ("time to first token", first)):
        what = f"chats beside long prompts, 1P+1D: {label}"
        rows += latency_rows(what, times["split"], "ours aggregated", times["whole"])
    return rows


async def ask_all(target: Target, bodies: Sequence[dict[str, object]]) -> Timings:
    async with Client(target) as client:
        for body in bodies:
            await client.ask(body)
        return client.timings


async def prefill_only(pair: Target, body: dict[str, object]) -> None:
    async with Client(pair) as client:
        await client.prefill(body)


def loaded(decode: Instance) -> tuple[float, float]:
    """Bytes and seconds of its loads since start."""
    text = httpx.get(f"{decode.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in text if not line.startswith("#"))
    names = ("epd_engine_kv_load_bytes_total", "epd_engine_kv_load_seconds_total")
    load_bytes, seconds = (float(values[name]) for name in names)
    return load_bytes, seconds


def least(kind: str, num_bytes: int, memory: Path) -> float:
    """Seconds that the bytes alone take, at best: copied, read, or written and read."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.empty_like(source)
    view, into = source.numpy().data, target.numpy().data
    path = memory / "least"
    path.write_bytes(view)

    def write() -> None:
        with open(path, "r+b", buffering=0) as file:
            file.write(view)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            file.readinto(into)

    steps: dict[str, list[Callable[[], object]]] = {
        "memcpy": [lambda: target.copy_(source)],
        "read": [read],
        "write and read": [write, read],
    }
    times = []
    for _ in range(7):
        began = time.perf_counter()
        for step in steps[kind]:
            step()
        times.append(time.perf_counter() - began)
    os.unlink(path)
    return min(times)


def _parts(text: str) -> frozenset[str]:
    wanted = frozenset(text.split(","))
    if unknown := sorted(wanted - set(PARTS)):
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; known are {', '.join(PARTS)}")
    return wanted


if __name__ == "__main__":
    main()
