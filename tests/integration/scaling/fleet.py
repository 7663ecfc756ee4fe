"""The work of kubelets and engines for one EPDDeployment: its pods run, and share a load that a test sets."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from tests.integration.operator.world import World
from tests.integration.scaling.engines import Engine, engine, running_at

QUEUED = "epd_engine_queued_media_tokens"
IN_PROGRESS = "epd_engine_requests_in_progress"
KV_USAGE = "epd_engine_kv_cache_usage_ratio"
MEDIA = "epd_proxy_media_items_total"
PERIOD_S = 0.1
_FULL = {"encoder": (QUEUED, 4096), "pd": (IN_PROGRESS, 48)}


class Fleet:
    """All pods of a role answer alike: each has its share of the role's load."""

    def __init__(self, world: World, engines: dict[str, Engine], name: str = "demo") -> None:
        self._world = world
        self._engines = engines
        self._name = name
        self.load = dict.fromkeys(engines, 0.0)
        """Of each role, in replicas that would be full with it."""
        self.pictures = 0.0
        """A second, as the proxy sees them."""
        self.replicas: dict[str, list[int]] = {role: [] for role in engines}
        """Of each role the number that was wanted, ten times a second."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run), threading.Thread(target=self._record)]

    def deployment(self, role: str) -> str:
        return f"{self._name}-{role}"

    def now(self, role: str) -> int:
        return self.replicas[role][-1] if self.replicas[role] else -1

    def forget(self) -> None:
        """What was recorded until now is no longer of interest."""
        for role in self.replicas:
            self.replicas[role] = self.replicas[role][-1:]

    def seen(self, role: str) -> set[int]:
        return set(self.replicas[role])

    @contextmanager
    def working(self) -> Iterator["Fleet"]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def explain(self, role: str) -> str:
        """What a person would look at."""
        scaler = self._world.get("horizontalpodautoscalers", self.deployment(role)) or {}
        conditions = scaler.get("metadata", {}).get("annotations", {})
        return f"{self.replicas[role][-50:]}\n{conditions}\n{self._engines[role].metrics}"

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(PERIOD_S):
            now = time.monotonic()
            try:
                for role, one in self._engines.items():
                    self._serve(role, one, now - last)
            except httpx.HTTPError:
                pass  # the API server is away, or a pod went
            last = now

    def _serve(self, role: str, one: Engine, elapsed: float) -> None:
        selector = f"app.kubernetes.io/instance={self._name},app.kubernetes.io/component={role}"
        pods = self._world.listed("pods", labelSelector=selector)
        for pod in pods:
            if "podIP" not in pod.get("status", {}):
                self._world.pod_status(pod["metadata"]["name"], running_at(one))
        if role == "proxy":
            one.metrics[MEDIA] = one.metrics.get(MEDIA, 0.0) + self.pictures * elapsed
            return
        metric, full = _FULL[role]
        one.metrics[metric] = self.load[role] * full / max(1, len(pods))
        if role == "pd":
            one.metrics[KV_USAGE] = 0.0

    def _record(self) -> None:
        while not self._stop.wait(PERIOD_S):
            for role, seen in self.replicas.items():
                try:
                    found = self._world.replicas(self.deployment(role))
                except httpx.HTTPError:
                    continue
                if found is not None:
                    seen.append(found)


@contextmanager
def fleet(world: World, *roles: str) -> Iterator[Fleet]:
    """Engines for these components (`proxy` too), at work while inside."""
    with ExitStack() as stack:
        engines = {role: stack.enter_context(engine()) for role in roles}
        yield stack.enter_context(Fleet(world, engines).working())
