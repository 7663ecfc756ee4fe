"""Host work of the next step beside the current one: it is planned and packed while the device computes.

That is where a device works by itself. On a CPU host and device are one: there it is the same work a little
earlier. A thread of its own for it was tried, and took nothing away there but cost up to a fifth of a step.
"""

import logging

from epd_engine.core.output import SchedulerOutput
from epd_engine.core.scheduler import Scheduler
from epd_engine.worker.model_runner import ModelRunner, PackedInputs

log = logging.getLogger(__name__)


class Lookahead:
    """Prepares the step after the one that `runner` executes, and keeps it until it is taken."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner):
        self._scheduler, self._runner = scheduler, runner
        self._prepared: tuple[SchedulerOutput, PackedInputs] | None = None
        runner.meanwhile = self._prepare

    def _prepare(self, step: SchedulerOutput) -> None:
        try:
            foreseen = self._scheduler.foresee(step)
            if foreseen is not None:
                self._prepared = foreseen, self._runner.pack(foreseen.chunks)
        except Exception:  # the step can be planned and packed in its turn, and whatever fails is told then
            log.exception("the next step could not be prepared")

    def take(self) -> tuple[SchedulerOutput, PackedInputs] | None:
        """The next step, ready to be executed, where what was foreseen has come true."""
        prepared, self._prepared = self._prepared, None
        return prepared if prepared is not None and self._scheduler.confirm(prepared[0]) else None
