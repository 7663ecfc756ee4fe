"""The horizontal pod autoscaler's arithmetic, as Kubernetes documents it (v2, its defaults)."""

import math
from collections import deque
from dataclasses import dataclass, field

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
STABILIZATION_SECONDS = 300.0  # before scaling down
FEWEST, MOST = 1, 64


@dataclass
class Autoscaler:
    """Of one role. `target` is the value that one replica should have."""

    target: float
    _recommended: deque[tuple[float, int]] = field(default_factory=deque)

    def desired(self, now: float, replicas: int, total: float) -> int:
        """`total` is the metric's sum over ready replicas; those that start count as 0, as HPA has it when
        scaling up."""
        wanted = replicas
        if abs(total / (replicas * self.target) - 1) > TOLERANCE:
            wanted = math.ceil(total / self.target)
        wanted = min(max(wanted, FEWEST), MOST, max(2 * replicas, replicas + 4))
        self._recommended.append((now, wanted))
        while self._recommended[0][0] <= now - STABILIZATION_SECONDS:
            self._recommended.popleft()
        if wanted < replicas:
            wanted = min(replicas, max(number for _, number in self._recommended))
        return wanted
