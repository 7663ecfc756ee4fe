"""EC metrics through vLLM's own Prometheus endpoint, under the names that our engine gives them."""

# mypy: disable-error-code="import-not-found"

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from epd_engine.ec_store.statistics import TransferStats

COUNTS = {
    "ec_external_hits": "Items loaded from the EC store in place of encoding them",
    "ec_misses": "Items that the EC store was asked for and did not hold",
    "ec_loads": "Items loaded from the EC store",
    "ec_load_failures": "Items known by their key alone that could not be loaded; each fails its request",
    "ec_saves": "Items published in the EC store",
    "ec_save_failures": "Items that could not be published",
}
TRANSFERS = {
    "ec_load_bytes": "Bytes loaded from the EC store",
    "ec_load_seconds": "Seconds spent on loads from the EC store",
    "ec_save_bytes": "Bytes published in the EC store",
    "ec_save_seconds": "Seconds from a save's begin until it was durable and visible",
}


@dataclass
class StoreStats(ECConnectorStats):  # type: ignore[misc]
    """What happened since the last report, as plain numbers: `{name}`, and `{name}/{tier}` for transfers."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: "StoreStats") -> "StoreStats":
        for name, value in other.data.items():
            self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def add(self, name: str, value: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + value


class TransferDelta:
    """Totals since start turned into what is new."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def add_to(self, stats: StoreStats, totals: Mapping[str, TransferStats], kind: str) -> None:
        """`kind` is "load" or "save"."""
        for tier, transfers in totals.items():
            for unit in ("bytes", "seconds"):
                name, total = f"ec_{kind}_{unit}/{tier}", getattr(transfers, f"{kind}_{unit}")
                if total > self._seen.get(name, 0):
                    stats.add(name, total - self._seen.get(name, 0))
                    self._seen[name] = total


class StorePromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of the above, with vLLM's labels and for transfers the tier."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counts = {
            name: counter(f"epd_engine_{name}", text, labelnames=list(labelnames))
            for name, text in COUNTS.items()
        }
        self._transfers = {
            name: counter(f"epd_engine_{name}", text, labelnames=[*labelnames, "tier"])
            for name, text in TRANSFERS.items()
        }
        for values in per_engine_labelvalues.values():
            for one in self._counts.values():
                one.labels(*values)  # there from the start, at 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            counted, _, tier = name.partition("/")
            if tier:
                self._transfers[counted].labels(*labels, tier).inc(value)
            else:
                self._counts[counted].labels(*labels).inc(value)
