"""Discovery: a role's instances follow the EndpointSlices of its Service.

List, then watch. A watch that ends in time is resumed where it was; after anything else everything is listed
again. While the API server is away the last known instances stay, and probes guard them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing, suppress

from epd_proxy import logs
from epd_proxy.apiserver import Connect, EndpointSlices
from epd_proxy.config import Origin
from epd_proxy.metrics import DiscoveryMetrics
from epd_proxy.pool import Pool
from epd_proxy.slices import Slice, service_of, usable

WATCH_SECONDS = 60
"""One watch. A connection that died silently is noticed at its end."""

_LATE_SECONDS = 5.0
"""How long after its end a watch may go on, and how long a list may take."""
_FIRST_BACKOFF = 0.5
_LAST_BACKOFF = 10.0


class Discovery:
    """Keeps pools as the API server lists them; `pools` are by Service."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        connect: Connect,
        metrics: DiscoveryMetrics,
        seconds: int = WATCH_SECONDS,
    ) -> None:
        self._pools = pools
        self._connect = connect
        self._metrics = metrics
        self._watch_seconds = seconds
        self._slices: dict[str, Slice] = {}
        self._known: dict[str, dict[Origin, str]] = {service: {} for service in pools}
        self._listed_at = float("inf")
        self._following: asyncio.Task[None] | None = None
        metrics.watch_up.set(0)

    def start(self) -> None:
        """Does not wait for the first list: `/ready` tells when there is a PD."""
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following

    async def _follow(self) -> None:
        pause = _FIRST_BACKOFF
        while True:
            self._listed_at = float("inf")
            try:
                async with self._connect() as api:
                    await self._list_and_watch(api)
            except Exception as error:  # noqa: BLE001 - whatever it is, what is known stays in use, and we go on
                self._lost(error)
            if _now() - self._listed_at > _LAST_BACKOFF:
                pause = _FIRST_BACKOFF
            # Many proxies lose one API server at once; they should not all come back at once.
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, _LAST_BACKOFF)

    async def _list_and_watch(self, api: EndpointSlices) -> None:
        """Until something breaks, and that raises."""
        async with asyncio.timeout(_LATE_SECONDS):
            slices, version = await api.list()
        self._slices = {one["metadata"]["name"]: one for one in slices}
        self._settle()
        self._listed_at = _now()
        self._metrics.watch_up.set(1)
        while True:
            began = _now()
            async with (
                asyncio.timeout(self._watch_seconds + _LATE_SECONDS),
                aclosing(api.watch(version, self._watch_seconds)) as events,
            ):
                async for kind, changed in events:
                    version = changed["metadata"]["resourceVersion"]
                    self._take(kind, changed)
            if _now() - began < 0.9 * self._watch_seconds:
                raise ConnectionError("the watch ended before its time")

    def _take(self, kind: str, changed: Slice) -> None:
        name = changed["metadata"].get("name")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[name] = changed
        else:
            return  # a bookmark brings nothing but a version
        self._settle()

    def _settle(self) -> None:
        """Make the pools what the slices say."""
        for service, pool in self._pools.items():
            before = self._known[service]
            now = usable(one for one in self._slices.values() if service_of(one) == service)
            for origin, pod in before.items():
                # Another pod at the same address is another instance.
                if now.get(origin) != pod:
                    pool.remove(origin)
                    logs.info("instance_gone", role=pool.role, url=origin.url)
            for origin, pod in now.items():
                if before.get(origin) != pod:
                    pool.add(origin)
                    logs.info("instance_found", role=pool.role, url=origin.url)
            self._known[service] = now

    def _lost(self, error: Exception) -> None:
        status = getattr(error, "status", None)  # of ApiFault, and of the package's own error
        if status is not None:
            reason = "expired" if status == 410 else "refused"
        else:
            reason = "silent" if isinstance(error, TimeoutError) else "lost"
        self._metrics.watch_up.set(0)
        self._metrics.watch_restarts.labels(reason).inc()
        logs.warning("watch_lost", reason=reason, error=f"{type(error).__name__}: {error}")


def _now() -> float:
    return asyncio.get_running_loop().time()
