"""What a step costs beside the model: 64 requests decode, before and after thousands of others came and went.

In a process of its own and without HTTP: the engine's synchronous core, whose `step` is timed from outside,
its runner's `execute` within it, and within that the model's own modules.
"""

import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNNING = 64
PROMPT = 48


@dataclass(frozen=True)
class StepCost:
    """Medians over steps, in ms."""

    step: float
    scheduling: float
    """Of these, before and after the runner: the plan, the books, the news."""
    host: float
    """Of these, all but the model's modules: also gathering tokens, packing, sampling."""


def step_costs(model: Path, threads: int, steps: int, finished: int) -> tuple[StepCost, StepCost]:
    """Fresh, and after `finished` requests have ended."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, model, threads, steps, finished).result()


def _measure(model: Path, threads: int, steps: int, finished: int) -> tuple[StepCost, StepCost]:
    import torch

    torch.set_num_threads(threads)
    bench = _Bench(model)
    bench.decode(4)  # warm
    fresh = bench.decode(steps)
    bench.finish(finished)
    return fresh, bench.decode(steps)


class _Bench:
    def __init__(self, model: Path):
        import torch

        from epd_engine.config import EngineConfig
        from epd_engine.engine import Engine

        self._torch = torch
        self._engine = Engine(
            EngineConfig(str(model), max_model_len=1024, kv_cache_tokens=RUNNING * 1024, max_num_seqs=RUNNING)
        )
        self._engine.smoke()
        self._added = 0
        self._runner = _Watch(self._engine.runner, "execute")
        self._model = [_Watch(self._engine.family, name) for name in ("embed", "forward", "logits")]

    def decode(self, steps: int) -> StepCost:
        """64 requests decode so many steps together."""
        for _ in range(RUNNING):
            self._add(PROMPT, steps + 8)
        while self._engine.scheduler.num_waiting:
            self._engine.step()
        self._engine.step()
        costs = [self._timed_step() for _ in range(steps)]
        self._drain()
        return StepCost(*map(statistics.median, zip(*costs, strict=True)))

    def _timed_step(self) -> tuple[float, float, float]:
        """A `StepCost` of one step."""
        for watch in (self._runner, *self._model):
            watch.ms = 0.0
        began = time.perf_counter()
        updates = self._engine.step()
        took = (time.perf_counter() - began) * 1000
        assert len(updates) == RUNNING, f"{len(updates)} of {RUNNING} requests decode"
        return took, took - self._runner.ms, took - sum(watch.ms for watch in self._model)

    def finish(self, count: int) -> None:
        for _ in range(count):
            self._add(4, 1)
            if self._engine.scheduler.num_waiting >= RUNNING:
                self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _add(self, length: int, tokens: int) -> None:
        from epd_engine.core.request import Request
        from epd_engine.core.sampling import SamplingParams

        self._added += 1
        generator = self._torch.Generator().manual_seed(self._added)
        prompt = self._torch.randint(10, 256, (length,), generator=generator).tolist()
        positions, delta = self._engine.family.positions(length, [])
        sampling = SamplingParams(max_tokens=tokens, temperature=0)
        self._engine.add(Request(f"r{self._added}", prompt, positions, delta, [], sampling))


class _Watch:
    """Counts the time that is spent in one method of an object."""

    def __init__(self, owner: object, name: str):
        self.ms = 0.0
        self._method = getattr(owner, name)
        setattr(owner, name, self._call)

    def _call(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._method(*arguments, **named)
        finally:
            self.ms += (time.perf_counter() - began) * 1000
