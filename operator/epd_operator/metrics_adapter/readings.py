"""The values of signals: of pods, and of roles."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .pods import Pod
from .scraper import Scraper
from .signals import Signal
from .window import merged, quantile


@dataclass(frozen=True)
class Reading:
    """A signal's value, of a pod or of a role."""

    labels: Mapping[str, str]
    """What a metric selector may ask for."""
    value: float
    at: float
    """Seconds since the epoch when it was seen last; of a role: the oldest of its pods' times."""
    seconds: float
    """The time over which it was taken."""


class Readings:
    """What the scraper knows, in terms of signals. Pods that say nothing of a signal, or nothing for too
    long, are left out: an autoscaler has rules of its own for pods without metrics."""

    def __init__(self, pods: Callable[[], Iterable[Pod]], scraper: Scraper) -> None:
        self._pods = pods
        self._scraper = scraper

    def of_pods(self, namespace: str, signal: Signal, now: float) -> list[tuple[Pod, Reading]]:
        """The signal's value of each pod that has it."""
        found = []
        for pod in self._of(namespace, signal):
            window = self._scraper.window(pod, now)
            value = None if window is None else window.value(signal)
            if window is not None and window.at is not None and value is not None:
                found.append((pod, Reading(pod.series_labels, value, window.at, window.seconds)))
        return found

    def of_roles(self, namespace: str, signal: Signal, now: float) -> list[Reading]:
        """The signal's value of each role of each deployment."""
        groups: defaultdict[tuple[str, str], list[tuple[Pod, Reading]]] = defaultdict(list)
        for pod, reading in self.of_pods(namespace, signal, now):
            role = pod.component if signal.component is None else signal.roles[0]
            groups[pod.deployment, role].append((pod, reading))
        return [
            Reading(
                {"namespace": namespace, "deployment": deployment, "role": role},
                self._together(signal, members, now),
                min(reading.at for _, reading in members),
                max(reading.seconds for _, reading in members),
            )
            for (deployment, role), members in groups.items()
        ]

    def _of(self, namespace: str, signal: Signal) -> list[Pod]:
        components = signal.roles if signal.component is None else (signal.component,)
        return [pod for pod in self._pods() if pod.namespace == namespace and pod.component in components]

    def _together(self, signal: Signal, members: list[tuple[Pod, Reading]], now: float) -> float:
        values = [reading.value for _, reading in members]
        if signal.together == "merged":
            windows = [self._scraper.window(pod, now) for pod, _ in members]
            seen = [window.observed(signal) for window in windows if window is not None]
            return quantile(merged(one for one in seen if one is not None))
        return sum(values) / (len(values) if signal.together == "mean" else 1)
