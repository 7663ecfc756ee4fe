"""Which changes of a status are worth an Event."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..api.status import Condition
from .scalers import TWO_SCALERS
from .store import JANITOR_FAILING

# These two repeat what the others say.
_SILENT = frozenset({"Progressing", "Degraded"})
# The way to being ready is no news; getting there is, and so is being stuck.
_ON_THE_WAY = frozenset({"Creating", "RollingOut", "Starting"})
_USUAL = frozenset({"ScaledToZero", "ClaimPending"})
# What is ready, and needs somebody all the same.
_UNUSUAL = frozenset({JANITOR_FAILING, TWO_SCALERS})
_NOTE_LENGTH = 1000


@dataclass(frozen=True)
class Note:
    """One thing to tell, as an Event."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str

    def name(self, resource: Mapping[str, Any]) -> str:
        """The Event's name: the same news of the same resource is one Event, whoever tells it how often."""
        parts = (resource["uid"], self.type, self.reason, self.message)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return f"{resource['name'][:200]}.{digest[:16]}"


def notes(before: Iterable[Condition], after: Iterable[Condition]) -> Iterator[Note]:
    """The news: conditions that have another status or reason than before.

    What Ready has from one of the parts is told once, by the part.
    """
    known = {one.type: (one.status, one.reason) for one in before}
    told = set()
    for one in sorted(after, key=lambda one: one.type == "Ready"):
        if one.type in _SILENT or (one.type == "Ready" and (one.status, one.reason) in told):
            continue
        told.add((one.status, one.reason))
        if known.get(one.type) == (one.status, one.reason) or one.reason in _ON_THE_WAY:
            continue
        usual = one.reason in _USUAL or (one.status == "True" and one.reason not in _UNUSUAL)
        message = f"{one.type}: {one.message}"[:_NOTE_LENGTH]
        yield Note("Normal" if usual else "Warning", one.reason, message)
