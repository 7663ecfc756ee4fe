"""One replica acts: whoever holds the Lease."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..apply.api import Api, ApiError
from ..apply.kinds import Kind

Object = dict[str, Any]
log = logging.getLogger(__name__)

LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")


@dataclass(frozen=True)
class Times:
    """Seconds of an election; each is well below the one before, so that the clock of nobody else matters."""

    lease: float = 15.0
    """Without a renewal for so long, others take over."""
    renew: float = 10.0
    """Without a renewal for so long, the holder stops."""
    retry: float = 2.0
    """Between two attempts."""


class Election:
    """Takes part in the election for one Lease.

    The age of somebody else's Lease is measured on our own clock, from when we saw it change: clocks of two
    machines may differ.
    """

    def __init__(
        self, api: Api, namespace: str, name: str, identity: str, times: Times | None = None
    ) -> None:
        self._api = api
        self._path = LEASE.path(namespace, name)
        self._collection = LEASE.collection(namespace)
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._times = times or Times()
        self._seen: Object | None = None
        self._seen_at = 0.0

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does the work whenever we hold the Lease, and stops it (by cancelling) before others may begin.

        Ends only by an error of the work, or when cancelled; then the Lease is given back.
        """
        while True:
            await self._acquire()
            log.info("leading", extra={"identity": self._identity})
            task = asyncio.ensure_future(work())
            try:
                await self._hold(task)
            finally:
                task.cancel()
                await asyncio.wait([task])
                await self._give_back()
            log.warning("no longer leading", extra={"identity": self._identity})

    async def _acquire(self) -> None:
        held = await self._try()
        while not held:
            await asyncio.sleep(self._times.retry)
            held = await self._try()

    async def _hold(self, task: "asyncio.Future[None]") -> None:
        """Renews the Lease, until that has not worked for too long."""
        now = asyncio.get_running_loop().time
        ends = now() + self._times.renew
        while now() < ends:
            done, _ = await asyncio.wait([task], timeout=min(self._times.retry, ends - now()))
            if done:
                task.result()
                raise RuntimeError("the work of a leader has no end")
            begun = now()
            if await self._try(within=ends - begun):
                ends = begun + self._times.renew

    async def _try(self, within: float | None = None) -> bool:
        """Takes or renews the Lease; whether it is ours now."""
        try:
            async with asyncio.timeout(within or self._times.renew):
                return await self._take()
        except (ApiError, TimeoutError) as error:
            log.warning("lease not renewed", extra={"error": str(error) or "no answer in time"})
            return False

    async def _take(self) -> bool:
        now, loop_now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), asyncio.get_running_loop().time()
        lease = await self._api.get(self._path)
        if lease is None:
            await self._api.create(self._collection, self._lease({}, self._ours(now, 0, now)))
            return True
        spec = lease.get("spec", {})
        if spec.get("holderIdentity") == self._identity:
            since = spec.get("acquireTime") or now
            await self._write(lease, self._ours(now, spec.get("leaseTransitions", 0), since))
            return True
        if spec != self._seen:
            self._seen, self._seen_at = spec, loop_now
        held_for = spec.get("leaseDurationSeconds") or self._times.lease
        if spec.get("holderIdentity") and loop_now < self._seen_at + held_for:
            return False
        await self._write(lease, self._ours(now, spec.get("leaseTransitions", 0) + 1, now))
        return True

    async def _give_back(self) -> None:
        """Lets others take over at once. A Lease that cannot be given back runs out."""
        try:
            async with asyncio.timeout(self._times.retry):
                lease = await self._api.get(self._path)
                if lease is not None and lease.get("spec", {}).get("holderIdentity") == self._identity:
                    await self._write(lease, {**lease["spec"], "holderIdentity": ""})
        except (ApiError, TimeoutError) as error:
            log.warning("lease not given back", extra={"error": str(error) or "no answer in time"})

    def _ours(self, now: str, transitions: int, since: str) -> Object:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._times.lease),
            "acquireTime": since,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    async def _write(self, lease: Object, spec: Object) -> None:
        # The version in the metadata makes two writers a conflict.
        await self._api.replace(self._path, self._lease(lease["metadata"], spec))

    def _lease(self, metadata: Object, spec: Object) -> Object:
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {**metadata, **self._metadata},
            "spec": spec,
        }
