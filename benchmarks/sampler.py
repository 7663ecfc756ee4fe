"""Cost of choosing tokens: the sampler on a whole batch, against transformers' logits processors row by row.

    python benchmarks/sampler.py            # 64 rows of 150 000 tokens
    python benchmarks/sampler.py --quick

Logits are peaked as a language model's are: a few hundred likely tokens over a long tail. Both sides see the
same rows; rounds of ours and of the peer alternate, and the median round counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from report import Row, print_table, write_json
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd_engine.core.request import Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.worker.sampler import Sampler

VOCAB = 150_000
PROMPT, ANSWER = 600, 200
FALL = 1.6
PEER = "transformers' processors"
MIXED: list[dict[str, float]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0},
]
SCENARIOS: dict[str, tuple[list[dict[str, float]], float]] = {
    "greedy": ([{"temperature": 0}], 0.8),
    "temperature alone": ([{"temperature": 1.0}], 5.0),
    "top-p 0.9": ([{"temperature": 1.0, "top_p": 0.9}], 10.0),
    "top-p 0.95, hot": ([{"temperature": 2.0, "top_p": 0.95}], 3.0),
    "top-k 50": ([{"temperature": 1.0, "top_k": 50}], 4.0),
    "mixed": (MIXED, 3.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="16 rows, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, rounds = (16, 2) if arguments.quick else (64, 5)
    measured = [
        _measure(f"{name}, {rows} x {VOCAB}", _requests(wanted, rows), rounds, target)
        for name, (wanted, target) in SCENARIOS.items()
    ]
    print_table(measured)
    if arguments.json:
        write_json(measured, arguments.json)


def _requests(wanted: Sequence[dict[str, float]], rows: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for row in range(rows):
        tokens = torch.randint(VOCAB, (PROMPT + ANSWER,), generator=generator).tolist()
        params = SamplingParams(max_tokens=ANSWER, **wanted[row % len(wanted)])  # type: ignore[arg-type]
        request = Request(str(row), tokens[:PROMPT], torch.zeros(1, PROMPT), 0, [], params)
        request.output_token_ids = tokens[PROMPT:]
        made.append(request)
    return made


def _logits(rows: int) -> torch.Tensor:
    """`[rows, VOCAB]`: the i-th likeliest token falls off as a power of i, rows in orders of their own."""
    generator = torch.Generator().manual_seed(1)
    falling = -FALL * torch.arange(1, VOCAB + 1).log()
    rank = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)])
    return falling[rank] + 0.1 * torch.randn(rows, VOCAB, generator=generator)


@torch.inference_mode()
def _measure(name: str, requests: Sequence[Request], rounds: int, target: float) -> Row:
    logits, sampler = _logits(len(requests)), Sampler()
    loops = [_processors(request.sampling) for request in requests]
    ids = [torch.tensor([r.prompt_token_ids + r.output_token_ids]) for r in requests]

    def ours(given: torch.Tensor) -> None:
        sampler.sample(requests, given)

    def peer(given: torch.Tensor) -> None:
        for row, (request, processors) in enumerate(zip(requests, loops, strict=True)):
            scores = processors(ids[row], given[row : row + 1])
            if request.sampling.is_greedy:
                int(scores.argmax(-1))
            else:
                int(torch.multinomial(torch.softmax(scores, -1), 1))

    times: dict[Callable[[torch.Tensor], None], list[float]] = {ours: [], peer: []}
    for _ in range(rounds + 1):
        for run, taken in times.items():
            given = logits.clone()
            begin = time.perf_counter()
            run(given)
            taken.append((time.perf_counter() - begin) * 1000)
    value, theirs = (statistics.median(times[run][1:]) for run in (ours, peer))  # the first warms up
    return Row(name, value, "ms", PEER, theirs, target)


def _processors(params: SamplingParams) -> LogitsProcessorList:
    """What `generate` would apply, in its order."""
    made = LogitsProcessorList()
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.is_greedy:
        return made
    made.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        made.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1:
        made.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        made.append(MinPLogitsWarper(params.min_p))
    return made


if __name__ == "__main__":
    main()
