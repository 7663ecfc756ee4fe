"""Asks engines how full they are: beside reconciling, which only reads what was last heard."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from ..apply.kinds import POD
from ..metrics_adapter.pods import Pod, pod_of
from ..metrics_adapter.scraper import Pace, Scraper
from ..metrics_adapter.signals import Signal, own_signals
from ..roles import TRAITS
from ..status.events import Note
from ..status.load import Bottleneck, Load, reported_load
from .cache import Cache, Key

Tell = Callable[[Key, Note], Awaitable[None]]


class LoadPoller:
    """Keeps the last loads of each resource's roles. `changed` is called for a resource with news, `tell`
    when one of its roles has been the bottleneck for so long."""

    def __init__(
        self, cache: Cache, interval_s: float, bottleneck_s: float, changed: Callable[[Key], None], tell: Tell
    ) -> None:
        self._cache = cache
        self._interval_s = interval_s
        self._bottleneck_s = bottleneck_s
        self._changed = changed
        self._tell = tell
        self._pods: list[Pod] = []
        pace = Pace(interval_s, 2 * interval_s, 3 * interval_s)
        self._scraper = Scraper(lambda: self._pods, pace)
        self._latest: dict[Key, dict[str, Load]] = {}
        self._bottlenecks: dict[Key, Bottleneck] = {}

    def latest(self, key: Key) -> dict[str, Load] | None:
        """By role what was last heard, nothing of silent roles; None before anybody was asked."""
        return self._latest.get(key)

    async def run(self) -> None:
        """Asks all, again and again, until cancelled."""
        async with self._scraper.session() as session:
            while True:
                keys = list(self._cache.resources())
                self._forget_but(keys)
                self._pods = [
                    pod for key in keys for one in self._cache.of_kind(key, POD) if (pod := pod_of(one))
                ]
                await self._scraper.round(session)
                now = time.time()
                for key in keys:
                    await self._look(key, now)
                await asyncio.sleep(self._interval_s)

    def _forget_but(self, keys: list[Key]) -> None:
        for gone in self._latest.keys() - set(keys):
            del self._latest[gone]
            self._bottlenecks.pop(gone, None)

    async def _look(self, key: Key, now: float) -> None:
        resource = self._cache.resource(key)
        if resource is None:
            return
        engine = resource.get("spec", {}).get("engine", {}).get("type", "native")
        pods = [pod for pod in self._pods if (pod.namespace, pod.deployment) == key]
        loads = {role: load for role in TRAITS if (load := self._load(engine, role, pods, now)) is not None}
        self._latest[key] = loads
        known = resource.get("status", {}).get("roles", {})
        before = {role: known.get(role, {}).get("load") for role in TRAITS}
        if any(reported_load(before[role], loads.get(role)) != before[role] for role in TRAITS):
            self._changed(key)
        bottleneck = self._bottlenecks.setdefault(key, Bottleneck(self._bottleneck_s))
        if (note := bottleneck.look(loads, now)) is not None:
            await self._tell(key, note)

    def _load(self, engine: str, role: str, pods: list[Pod], now: float) -> Load | None:
        windows = [self._scraper.window(pod, now) for pod in pods if pod.component == role]

        def means() -> Iterator[tuple[Signal, float, float, int]]:
            for signal, full in own_signals(engine, role):
                values = [one.value(signal) for one in windows if one is not None]
                known = [value for value in values if value is not None]
                if known:
                    yield signal, sum(known) / len(known), full, len(known)

        found = [
            Load(round(100 * mean / full), signal.name, mean, full, count)
            for signal, mean, full, count in means()
        ]
        return max(found, key=lambda load: load.percent, default=None)
