"""Rows of a benchmark: a table for people, JSON for programs.

A ratio is turned so that larger is better: ours over the peer's for rates, the peer's over ours for times and
memory. `target` is what the ratio should reach, or None where nothing is promised.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LARGER_IS_BETTER = frozenset({"requests/s", "tokens/s", "MB/s", "GB/s"})


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.peer_value is None:
            return None
        if self.value == self.peer_value:
            return 1.0  # also for a count that is the same as its limit of 0
        if self.unit in LARGER_IS_BETTER:
            return self.value / self.peer_value
        return self.peer_value / self.value


def latency_rows(name: str, ours: Sequence[float], peer: str, theirs: Sequence[float]) -> list[Row]:
    """Median and 99th percentile of latencies in seconds, as rows in ms."""
    return [
        Row(
            f"{name}, p{100 * share:.0f}",
            _quantile(ours, share) * 1000,
            "ms",
            peer,
            _quantile(theirs, share) * 1000,
        )
        for share in (0.5, 0.99)
    ]


def print_table(rows: Sequence[Row]) -> None:
    """A Markdown table, fit for docs/benchmarks.md as it is."""
    print("| what | ours | unit | peer | peer's | ratio | target |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row.name, _number(row.value), row.unit, row.peer or "-"]
        cells += [_number(row.peer_value), _number(row.ratio), _number(row.target)]
        print("| " + " | ".join(cells) + " |")


def write_json(rows: Sequence[Row], path: Path) -> None:
    documents = [{**asdict(row), "ratio": row.ratio} for row in rows]
    path.write_text(json.dumps(documents, indent=2) + "\n")


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
