"""What one replica takes for its work, as `scaling_sim.py` wants it: tower, prompt, decode steps.

    python benchmarks/service_times.py [--threads N]

The engine's synchronous core in this process, without HTTP, on random weights of 108 million parameters in
bfloat16. Each number is the median of several; the decode steps of several batches are fitted by a line.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_model import make
from PIL import Image

from epd_engine.config import EngineConfig
from epd_engine.core.request import Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.engine import Engine

TURNS = 7
PROMPT = 512
BATCHES = (1, 2, 4, 8, 16)
STEPS = 16


class Bench:
    def __init__(self, model: Path):
        self._engine = Engine(
            EngineConfig(
                str(model),
                max_model_len=1024,
                kv_cache_tokens=max(BATCHES) * 1024,
                max_num_seqs=max(BATCHES),
                max_num_batched_tokens=PROMPT,
            )
        )
        self._engine.smoke()
        self._added = 0

    def encode_token(self) -> float:
        """Seconds in the tower for each embedding of a picture of 448x448."""
        family = self._engine.family
        item = family.process("image", Image.new("RGB", (448, 448)), {})
        return median(lambda: family.encode([item.features])) / len(family.encode([item.features])[0])

    def prefill_token(self, step: float) -> float:
        """Seconds for each token of a prompt, computed in one step of `step` seconds without it."""

        def prompt() -> None:
            self._add(PROMPT, 1)
            self._drain()

        return (median(prompt) - step) / PROMPT

    def steps(self) -> tuple[float, float]:
        """Seconds of a decode step: of its own, and for each request in it."""
        medians = [self._decode(batch) for batch in BATCHES]
        each, own = np.polyfit(BATCHES, medians, 1)
        return float(own), float(each)

    def _decode(self, batch: int) -> float:
        for _ in range(batch):
            self._add(64, STEPS + 8)
        while self._engine.scheduler.num_waiting:
            self._engine.step()
        self._engine.step()
        took = median(self._engine.step, STEPS)
        self._drain()
        return took

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _add(self, length: int, tokens: int) -> None:
        self._added += 1
        generator = torch.Generator().manual_seed(self._added)
        prompt = torch.randint(10, 256, (length,), generator=generator).tolist()
        positions, delta = self._engine.family.positions(length, [])
        sampling = SamplingParams(max_tokens=tokens, temperature=0)
        self._engine.add(Request(f"r{self._added}", prompt, positions, delta, [], sampling))


def median(work: Callable[[], Any], turns: int = TURNS) -> float:
    """Seconds."""
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        make(Path(folder), "qwen2_5_vl", "100m", dtype=torch.bfloat16)
        bench = Bench(Path(folder))
        step, step_request = bench.steps()
        print(
            f"ServiceTimes(encode_token={bench.encode_token():.2e}, "
            f"prefill_token={bench.prefill_token(step):.2e}, "
            f"step={step:.2e}, step_request={step_request:.2e})"
        )


if __name__ == "__main__":
    main()
