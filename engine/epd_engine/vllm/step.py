"""What the two sides tell each other: the scheduler's plan of a step, the worker's report of it."""

# mypy: disable-error-code="import-not-found"

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.base import ECConnectorMetadata as SavePlan


@dataclass
class StepPlan(ECConnectorMetadata):  # type: ignore[misc]
    """One step's work for the worker side.

    `loads` are entries that the scheduler side has read and checked, `[num_embeds, width]` on the CPU:
    nothing that happens to the store afterwards can make the step fail. `saves` is the plan of the connector
    that saves, where this instance is a producer; `again` are those of its keys that the worker need not
    encode, since they lie in its encoder cache.
    """

    loads: dict[str, torch.Tensor] = field(default_factory=dict)
    saves: SavePlan | None = None
    again: list[str] = field(default_factory=list)


@dataclass
class WorkerReport(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker side has published since start, by tier; for metrics alone, as vLLM's V1 runner drops
    the reports of an encode-only instance."""

    totals: Mapping[str, TransferStats] = field(default_factory=dict)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        # One worker saves; the others have nothing to say.
        return WorkerReport({**self.totals, **other.totals})
