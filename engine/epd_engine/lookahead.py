"""Host work of the next step beside the current one: it is planned and packed while the model runs."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from epd_engine.core.output import SchedulerOutput
from epd_engine.core.scheduler import Scheduler
from epd_engine.worker.model_runner import ModelRunner, PackedInputs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedStep:
    """A foreseen step, and what the language model needs for it."""

    step: SchedulerOutput
    inputs: PackedInputs


class Lookahead:
    """A thread that prepares the step after the one that runs. Its methods are for the engine's thread, which
    waits for it before anything that it reads may change."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner):
        self._scheduler, self._runner = scheduler, runner
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._prepared: PreparedStep | None = None
        # torch takes the number for threads that begin later too, so that the old one is set again.
        threads = torch.get_num_threads()
        self._thread.submit(_compute_alone).result()
        torch.set_num_threads(threads)

    @contextmanager
    def beside(self, step: SchedulerOutput) -> Iterator[None]:
        """While the block executes `step`, the step after it is prepared where it is foreseeable."""
        if not self._scheduler.is_foreseeable(step):  # and the thread is not woken
            yield
            return
        preparing = self._thread.submit(self._prepare, step)
        try:
            yield
        finally:
            self._prepared = preparing.result()

    def take(self) -> PreparedStep | None:
        """The next step, ready to be executed, where what was foreseen has come true."""
        prepared, self._prepared = self._prepared, None
        return prepared if prepared is not None and self._scheduler.confirm(prepared.step) else None

    def shutdown(self) -> None:
        self._thread.shutdown()

    def _prepare(self, step: SchedulerOutput) -> PreparedStep | None:
        try:
            foreseen = self._scheduler.foresee(step)
            if foreseen is None:
                return None
            return PreparedStep(foreseen, self._runner.pack(foreseen.chunks))
        except Exception:  # the step can be planned and packed in its turn, and whatever fails is told then
            log.exception("the next step could not be prepared")
            return None


def _compute_alone() -> None:
    """The thread's tensors are small; compute threads of its own would take cores from the model."""
    torch.get_num_threads()  # takes over the common number, which would otherwise happen later
    torch.set_num_threads(1)
