"""Whether the operator still sees and still works."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Health:
    """What /healthz and /readyz ask.

    A quiet cluster sends nothing, so silence tells nothing. But each watch is ended by the API server and
    begun anew before `stall_s` is over: one that was not begun for so long is dead, whoever killed it. A
    reconcile that takes so long is stuck, too.
    """

    stall_s: float
    clock: Callable[[], float]
    watched: dict[str, float] = field(default_factory=dict)
    """By path, when a watch was last begun; or when we began to wait for its first time."""
    listed: set[str] = field(default_factory=set)
    """Paths of which a whole list has been seen."""
    working: dict[object, float] = field(default_factory=dict)
    """Since when each reconcile under way runs."""

    def expect(self, paths: Iterable[str]) -> None:
        """Names the paths that are to be watched."""
        self.watched.update(dict.fromkeys(paths, self.clock()))

    def begin(self, work: object) -> None:
        """A reconcile begins."""
        self.working[work] = self.clock()

    def end(self, work: object) -> None:
        """A reconcile is over."""
        self.working.pop(work, None)

    def stalled(self) -> list[str]:
        """What has stalled, in words; nothing when all is well."""
        return [
            *(f"not watching {path} for {age:.0f} s" for path, age in self._old(self.watched)),
            *(f"reconciling {key} for {age:.0f} s" for key, age in self._old(self.working)),
        ]

    def unready(self) -> list[str]:
        """What is not known yet, in words."""
        if not self.watched:
            return ["the API server was not reached yet, or lacks the resource definition"]
        return [f"{path} was not listed yet" for path in self.watched if path not in self.listed]

    def _old(self, times: Mapping[object, float] | Mapping[str, float]) -> list[tuple[object, float]]:
        now = self.clock()
        return [(name, now - since) for name, since in times.items() if now - since > self.stall_s]
