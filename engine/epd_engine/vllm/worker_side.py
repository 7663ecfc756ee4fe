"""The worker side: puts what was loaded into vLLM's encoder cache, and publishes what was encoded."""

import logging

import torch

from epd_engine.ec_transfer.base import ECConnectorBase
from epd_engine.vllm.step import StepPlan, WorkerReport

log = logging.getLogger(__name__)


class WorkerSide:
    """`saver` is a producer's connector, on the one worker of an instance that saves."""

    def __init__(self, saver: ECConnectorBase | None, device: str):
        self._saver, self._device = saver, device
        if saver is not None:
            saver.register_caches({}, torch.device("cpu"))

    def place(self, plan: StepPlan, encoder_cache: dict[str, torch.Tensor]) -> None:
        """What the scheduler side has loaded goes into the encoder cache."""
        for key, tensor in plan.loads.items():
            encoder_cache[key] = tensor.to(self._device)

    def begin_saves(self, plan: StepPlan, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Before the encoder runs: what lies in its cache and has gone from the store is published again."""
        self.place(plan, encoder_cache)
        if self._saver is None or plan.saves is None:
            return
        self._saver.bind_connector_metadata(plan.saves)
        self._saver.free_physical_cache()
        for key in plan.again:
            if key in encoder_cache:
                self.save(encoder_cache, key)

    def save(self, encoder_cache: dict[str, torch.Tensor], key: str) -> None:
        """Begins to publish one item of the plan; others are left alone."""
        if self._saver is None:
            return
        # In this thread and its stream, which has computed it.
        tensor = encoder_cache[key].detach().to("cpu").contiguous()
        if not bool(torch.isfinite(tensor).all()):
            log.error("entry %s is not published: the encoder's output has values that are no numbers", key)
            return
        self._saver.save_caches({key: tensor}, key)

    def finish(self, plan: StepPlan) -> None:
        """Returns once every save of the step is durable and visible, or has failed."""
        if self._saver is None or plan.saves is None:
            return
        self._saver.wait_for_save()
        self._saver.get_finished()  # has logged what failed; the scheduler side finds out from the store
        self._saver.clear_connector_metadata()

    def report(self) -> WorkerReport | None:
        return None if self._saver is None else WorkerReport(self._saver.statistics())

    def close(self) -> None:
        if self._saver is not None:
            self._saver.shutdown()
