"""Pure: how full roles are, when that is news, and which one holds the others up."""

from collections.abc import Mapping
from dataclasses import dataclass

from .events import Note

_NEWS = 10
"""Fewer percent are no news."""
_FULL = 100
_LETTERS = {"encoder": "E", "pd": "PD", "prefill": "P", "decode": "D"}
BOTTLENECK = "Bottleneck"


@dataclass(frozen=True)
class Load:
    """How full a role is, by the signal that says the most."""

    percent: int
    """100 where its replicas are full in the mean."""
    signal: str
    value: float
    """The signal's mean per replica."""
    full: float
    """At which value a replica is full."""
    replicas: int
    """That were asked."""

    def __str__(self) -> str:
        return (
            f"{self.percent}% full: {self.signal} is {self.value:g} a replica, of {self.full:g}, "
            f"with {self.replicas} {'replica' if self.replicas == 1 else 'replicas'}"
        )


def reported_load(before: int | None, load: Load | None) -> int | None:
    """What a status says of a role: as before, unless there is news. None where nothing is known."""
    if load is None:
        return None
    if before is None or abs(load.percent - before) >= _NEWS:
        return load.percent
    return load.percent if (before >= _FULL) != (load.percent >= _FULL) else before


def load_summary(percents: Mapping[str, int | None]) -> str | None:
    """For `kubectl get`: `E 85% PD 40%`."""
    known = [f"{_LETTERS[role]} {one}%" for role, one in percents.items() if one is not None]
    return " ".join(known) or None


class Bottleneck:
    """Of one resource, since when a role is full and fuller than all others."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._role: str | None = None
        self._since = 0.0
        self._told = False

    def look(self, loads: Mapping[str, Load], now: float) -> Note | None:
        """Takes in loads as they are now; news once a role has been the bottleneck for long enough."""
        role = max(loads, key=lambda one: loads[one].percent, default=None)
        if role is not None and loads[role].percent < _FULL:
            role = None
        if role != self._role:
            self._role, self._since, self._told = role, now, False
        if role is None or self._told or now - self._since < self._after_s:
            return None
        self._told = True
        others = "; ".join(f"{one} {loads[one].percent}%" for one in loads if one != role)
        words = f"{role} has been the bottleneck for {_minutes(self._after_s)}, {loads[role]}"
        return Note("Warning", BOTTLENECK, f"{words} (beside it: {others})" if others else words)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} seconds"
