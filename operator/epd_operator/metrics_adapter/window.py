"""Pure: what a pod's last looks tell together."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from .exposition import Exposition
from .signals import Signal

Buckets = Mapping[float, float]
QUANTILE = 0.95


@dataclass(frozen=True)
class Look:
    """One scrape."""

    at: float
    """Seconds since the epoch."""
    found: Exposition


class Window:
    """The looks at one pod within the last `length_s` seconds, and one before them for differences."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._looks: deque[Look] = deque()

    @property
    def at(self) -> float | None:
        """When the pod was last seen; None: never."""
        return self._looks[-1].at if self._looks else None

    def add(self, look: Look) -> None:
        """Takes in a look that is newer than all others."""
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].at <= look.at - self._length_s:
            self._looks.popleft()

    @property
    def seconds(self) -> float:
        """The time that the looks span."""
        return self._looks[-1].at - self._looks[0].at if self._looks else 0.0

    def value(self, signal: Signal) -> float | None:
        """A signal's value; None where the pod does not have it, or was not looked at often enough."""
        if signal.reading == "p95":
            seen = self.observed(signal)
            return None if seen is None else quantile(seen)
        series = [(look.at, _sum(look.found.values, signal)) for look in self._looks]
        known = [(at, value) for at, value in series if value is not None]
        if not known or series[-1][1] is None:
            return None
        if signal.reading == "gauge":
            newest = known[-1][0]
            recent = [value for at, value in known if at > newest - self._length_s]
            return sum(recent) / len(recent)
        if len(known) < 2:
            return None
        grown = sum(_growth(old, new) for (_, old), (_, new) in pairwise(known))
        return grown / (known[-1][0] - known[0][0])

    def observed(self, signal: Signal) -> Buckets | None:
        """What a histogram took in over the window; None where the pod does not have it."""
        seen = [found for look in self._looks if (found := _buckets(look.found, signal)) is not None]
        if len(seen) < 2:
            return None
        return merged(_grown(old, new) for old, new in pairwise(seen))


def merged(parts: Iterable[Buckets]) -> Buckets:
    """Several histograms as one. Bounds differ only between engines, of which a role has one."""
    total: dict[float, float] = {}
    for part in parts:
        for bound, count in part.items():
            total[bound] = total.get(bound, 0.0) + count
    return total


def quantile(buckets: Buckets, share: float = QUANTILE) -> float:
    """The value that a share of the observations does not exceed, as Prometheus interpolates it; 0 where
    there were none."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return 0.0
    rank = share * total
    below, count_below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (rank - count_below) / (count - count_below)
        below, count_below = bound, count
    return below


def _grown(old: Buckets, new: Buckets) -> Buckets:
    return {bound: _growth(old.get(bound, 0.0), count) for bound, count in new.items()}


def _growth(old: float, new: float) -> float:
    """Of a counter, which begins at 0 again when its process does."""
    return new - old if new >= old else new


def _sum(values: Mapping[str, float], signal: Signal) -> float | None:
    for names in signal.sources:
        if all(name in values for name in names):
            return sum(values[name] for name in names)
    return None


def _buckets(found: Exposition, signal: Signal) -> Buckets | None:
    return next((found.buckets[name] for (name,) in signal.sources if name in found.buckets), None)
