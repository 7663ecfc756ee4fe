"""Which prefill and decode instances do not fit each other: another model, revision or layout of KV.

A decode instance alone can tell, and refuses. What it said is remembered for a while, so that during a
rollout not every request is refused first; it is a hint, never a reason to serve nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from weakref import WeakKeyDictionary

from epd_proxy.pool import Instance

_Refused = WeakKeyDictionary[Instance, float]


class Pairs:
    """Refusals of the last `seconds`. An instance that is gone is forgotten by itself."""

    def __init__(self, seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._refused: WeakKeyDictionary[Instance, _Refused] = WeakKeyDictionary()

    def refused(self, prefill: Instance, decode: Instance) -> None:
        """`decode` does not take what `prefill` hands over."""
        self._refused.setdefault(prefill, WeakKeyDictionary())[decode] = self._clock() + self._seconds

    def unfit(self, prefill: Instance) -> set[Instance]:
        """Decode instances that lately refused a prefill instance."""
        now = self._clock()
        return {decode for decode, until in self._refused.get(prefill, {}).items() if now < until}

    def hopeless(self, prefills: Collection[Instance], decodes: Collection[Instance]) -> set[Instance]:
        """Prefill instances that all of `decodes` lately refused."""
        return {one for one in prefills if decodes and self.unfit(one).issuperset(decodes)}
