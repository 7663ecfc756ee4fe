"""The engine against plain transformers and vLLM's CPU build, on the same weights and the same machine.

    python benchmarks/engine.py [--quick] [--only throughput,text,...] [--vllm] [--json FILE]

Random weights in bfloat16: one model of 108 million parameters and a toy of 1.4 million. Peers take turns,
round by round; whoever is not measured is stopped in its tracks. The best round counts, or the median of all
requests where single ones are timed. vLLM needs its environment, which `--vllm` installs (minutes, 2.5 GB).

  throughput   output tokens/s, 16 in flight, a new picture of 448x448 each
  text         the same without pictures
  first        time to the first token, 1 in flight, 1 encoder + 1 PD, toy and large model
  start        seconds from the start of an instance to ready, and its resident memory afterwards
  steps        what a step costs beside the model, 64 requests running, before and after many have finished
  beside       text chats beside a stream of heavy pictures: 1E+1PD against our aggregated server
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Row, latency_rows, print_table, write_json
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_instances import Instance, Peers, alone, ours, started, vllm
from engine_load import Chats, Mixture, Target, beside_pictures, requests
from engine_steps import RUNNING, step_costs
from engine_transformers import Worker, loop
from make_model import make

from tests.support.vllm import installed_python, vllm_python

LARGE, TOY = "100m", "tiny"
CONCURRENCY, TOKENS, SIDE = 16, 32, 448
VLLM, TRANSFORMERS = "vLLM", "transformers loop"
PRODUCER, CONSUMER = "ec_producer", "ec_consumer"
OVERHEAD_LIMIT = 5.0  # %


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    rounds: int
    requests: int
    loop_requests: int
    firsts: int
    starts: int
    steps: int
    finished: int
    seconds: float


FULL = Extent(
    rounds=5, requests=48, loop_requests=8, firsts=40, starts=2, steps=100, finished=20_000, seconds=60
)
QUICK = Extent(
    rounds=1, requests=24, loop_requests=4, firsts=8, starts=1, steps=30, finished=1_000, seconds=8
)
TRIAL = Extent(rounds=1, requests=4, loop_requests=1, firsts=2, starts=1, steps=3, finished=128, seconds=4)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and so end what was started
    options = arguments()
    extent = TRIAL if options.trial else QUICK if options.quick else FULL
    python = vllm_python() if options.vllm else installed_python()
    if python is None:
        print("vLLM is not installed: no rows against it; --vllm installs it", file=sys.stderr)
    with ExitStack() as stack:
        folder, memory = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-engine-", dir=directory)))
            for directory in (None, options.memory)
        )
        peers = Peers(folder, memory, options.threads, python)
        logging.disable_progress_bar()
        for size in (LARGE, TOY):
            make(peers.model(size), "qwen2_5_vl", size, dtype=torch.bfloat16)
        rows = [row for session in SESSIONS for row in session(peers, extent, options.only)]
    print_table(rows)
    if options.json:
        write_json(rows, options.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer requests: under five minutes")
    parser.add_argument("--trial", action="store_true", help="a few requests: only shows that it runs")
    parser.add_argument(
        "--only", type=_parts, default=frozenset(PARTS), metavar="PART,...", help=", ".join(PARTS)
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each process (default: 1)")
    parser.add_argument("--vllm", action="store_true", help="install vLLM if it is not there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.add_argument("--memory", type=Path, default="/dev/shm", metavar="DIR", help="on a tmpfs")
    return parser.parse_args()


def aggregated(peers: Peers, extent: Extent, only: frozenset[str]) -> list[Row]:
    """Throughput with pictures and without; start-up of whole servers."""
    if not only & {"throughput", "text", "start"}:
        return []
    print("aggregated servers, large model", flush=True)
    mine = ours(peers, LARGE)
    theirs = vllm(peers, LARGE) if peers.vllm else None
    servers = [mine] if theirs is None else [mine, theirs]
    rows: list[Row] = []
    with started(servers, extent.starts), loop(peers.model(LARGE), peers.threads) as worker:
        if "throughput" in only:
            rows += throughput("a picture each", SIDE, servers, worker, extent, 2.2)
        if "text" in only:
            rows += throughput("text only", None, servers, worker, extent, 5.0)
        if "start" in only:
            rows += start_rows("aggregated", mine, theirs)
    return rows


def throughput(
    name: str, side: int | None, servers: Sequence[Instance], worker: Worker, extent: Extent, target: float
) -> list[Row]:
    """Output tokens/s of each, the best of the rounds."""
    print(f"  throughput, {name} ...", flush=True)
    rates: list[list[float]] = [[] for _ in servers]
    looped = []
    for turn in range(-1, extent.rounds):  # the first warms up
        count = min(extent.requests, CONCURRENCY // 2) if turn < 0 else extent.requests
        for server, found in zip(servers, rates, strict=True):
            chats = Chats(seed=turn + 100)
            bodies = [chats.picture(side, TOKENS) if side else chats.text(TOKENS) for _ in range(count)]
            with alone(server):
                _, seconds = asyncio.run(requests(Target(server), bodies, CONCURRENCY))
            if turn >= 0:
                found.append(count * TOKENS / seconds)
        rate = worker.tokens_per_second(1 if turn < 0 else extent.loop_requests, side, TOKENS, turn + 100)
        if turn >= 0:
            looped.append(rate)
    best = [max(found) for found in rates]
    label = f"{name}, {CONCURRENCY} in flight"
    rows = [Row(label, best[0], "tokens/s", TRANSFORMERS, max(looped), target)]
    return rows + [Row(label, best[0], "tokens/s", VLLM, rate, 1.0) for rate in best[1:]]


def disaggregated(peers: Peers, extent: Extent, only: frozenset[str]) -> list[Row]:
    """Time to the first token through 1E+1PD; start-up and memory of encoders and PDs."""
    rows: list[Row] = []
    if "first" in only:
        rows += pairs(peers, extent, TOY, 2.0, only - {"start"})
    if only & {"first", "start"}:
        rows += pairs(peers, extent, LARGE, 1.0, only)
    return rows


def pairs(peers: Peers, extent: Extent, size: str, target: float, only: frozenset[str]) -> list[Row]:
    print(f"1E+1PD, {size} model", flush=True)
    mine = Target(ours(peers, size, CONSUMER), ours(peers, size, PRODUCER))
    theirs = Target(vllm(peers, size, CONSUMER), vllm(peers, size, PRODUCER)) if peers.vllm else None
    targets = [mine] if theirs is None else [mine, theirs]
    rows: list[Row] = []
    with started([i for t in targets for i in t.instances], extent.starts if "start" in only else 1):
        # Also where only memory is asked for: an instance that never served holds less.
        times = first_tokens(targets, extent)
        if "first" in only:
            label = f"1E+1PD: time to first token, {size} model, 1 in flight"
            rows += [Row(label, times[0], "ms", VLLM, peer, target) for peer in times[1:]]
            if theirs is None:
                rows.append(Row(label, times[0], "ms"))
        if "start" in only:
            names = ("encoder", "PD")
            for index, name in enumerate(names):
                peer_instance = theirs.instances[index] if theirs else None
                rows += start_rows(name, mine.instances[index], peer_instance)
                rows.append(memory_row(name, mine.instances[index], peer_instance))
    return rows


def first_tokens(targets: Sequence[Target], extent: Extent) -> list[float]:
    """Medians in ms; the peers take turns in tens of requests."""
    print("  time to first token ...", flush=True)
    found: list[list[float]] = [[] for _ in targets]
    chats = Chats(seed=1)
    for turn in range(-1, -(-extent.firsts // 10)):
        count = min(10, extent.firsts)
        for target, times in zip(targets, found, strict=True):
            bodies = [chats.picture(SIDE, 4) for _ in range(count)]
            with alone(*target.instances):
                timings, _ = asyncio.run(requests(target, bodies, 1))
            if turn >= 0:
                times += timings.first
    return [statistics.median(times) * 1000 for times in found]


def start_rows(name: str, mine: Instance, theirs: Instance | None) -> list[Row]:
    label = f"{name}: start to ready, {LARGE} model"
    if theirs is None:
        return [Row(label, mine.seconds, "s")]
    return [Row(label, mine.seconds, "s", VLLM, theirs.seconds, 3.0)]


def memory_row(name: str, mine: Instance, theirs: Instance | None) -> Row:
    label = f"{name}: resident memory, {LARGE} model"
    if theirs is None:
        return Row(label, mine.resident(), "MB")
    return Row(label, mine.resident(), "MB", VLLM, theirs.resident(), 2.0)


def steps(peers: Peers, extent: Extent, only: frozenset[str]) -> list[Row]:
    if "steps" not in only:
        return []
    print(f"steps of {RUNNING} requests, large model", flush=True)
    fresh, later = step_costs(peers.model(LARGE), peers.threads, extent.steps, extent.finished)
    label = f"step of {RUNNING} requests"
    after = f"before {extent.finished} had finished"
    scheduling, host = (100 * part / fresh.step for part in (fresh.scheduling, fresh.host))
    return [
        Row(f"{label}: share of scheduling", scheduling, "%", "limit", OVERHEAD_LIMIT, 1.0),
        Row(f"{label}: share of all but the model", host, "%"),
        Row(f"{label}: scheduling, later", later.scheduling, "ms", after, fresh.scheduling, 0.9),
        Row(f"{label}: all of it, later", later.step, "ms", after, fresh.step, 0.9),
    ]


def beside(peers: Peers, extent: Extent, only: frozenset[str]) -> list[Row]:
    """Two cores for both: one server with two threads, or two with one each; prefill in like chunks."""
    if "beside" not in only:
        return []
    print("text chats beside heavy pictures, large model", flush=True)
    chunks = ["--max-num-batched-tokens", "256"]
    whole = Target(ours(peers, LARGE, threads=2, extra=chunks))
    split = Target(
        ours(peers, LARGE, CONSUMER, threads=1, extra=chunks), ours(peers, LARGE, PRODUCER, threads=1)
    )
    first: dict[str, list[float]] = {"split": [], "whole": []}
    between: dict[str, list[float]] = {"split": [], "whole": []}
    with started([*whole.instances, *split.instances]):
        for turn in range(-1, extent.rounds):
            for name, target in (("whole", whole), ("split", split)):
                with alone(*target.instances):
                    seconds = 4 if turn < 0 else extent.seconds / extent.rounds
                    timings = asyncio.run(beside_pictures(target, Mixture(), Chats(turn + 7), seconds))
                if turn >= 0:
                    first[name] += timings.first
                    between[name] += timings.between
    rows = []
    for label, times in (("time to first token", first), ("between tokens", between)):
        what = f"text beside pictures, 1E+1PD: {label}"
        rows += latency_rows(what, times["split"], "ours aggregated", times["whole"])
    return rows


PARTS = ("throughput", "text", "first", "start", "steps", "beside")
SESSIONS: Sequence[Callable[[Peers, Extent, frozenset[str]], list[Row]]] = (
    aggregated,
    disaggregated,
    steps,
    beside,
)


def _parts(text: str) -> frozenset[str]:
    wanted = frozenset(text.split(","))
    if unknown := sorted(wanted - set(PARTS)):
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; known are {', '.join(PARTS)}")
    return wanted


if __name__ == "__main__":
    main()
