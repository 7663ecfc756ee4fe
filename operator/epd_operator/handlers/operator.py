"""The operator as a whole."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import kopf

from ..apply.api import Api, ApiError
from ..apply.kinds import POD, RESOURCE, child_kinds, choose_versions
from ..render import Images, RenderContext, ServedVersions
from ..status.events import Note
from .access import Access
from .cache import Cache, Key
from .health import Health
from .leader import Election
from .load import LoadPoller, Tell
from .metrics import Metrics
from .queue import WorkQueue
from .reconcile import Reconciler, Result
from .recorder import Recorder
from .server import health_routes, metrics_routes, serving
from .usage import UsagePoller
from .watching import Watches, kopf_settings

log = logging.getLogger(__name__)

WORKERS = 8
_DISCOVERY_RETRY_S = 1.0


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    images: Images
    namespaces: tuple[str, ...]
    """Empty: the whole cluster."""
    lease_name: str | None
    """The Lease to hold while acting; None: act without one."""
    lease_namespace: str | None
    identity: str
    metrics_port: int
    health_port: int
    tick_s: float
    stall_s: float
    usage_interval_s: float
    """Between two looks at how full a store is."""
    prometheus_address: str | None = None
    """For KEDA."""
    load_interval_s: float = 15.0
    """Between two looks at how full engines are."""
    bottleneck_s: float = 300.0
    """A role that holds up the others for so long is told of."""


class Operator:
    """One replica of the operator; `run` is its whole life."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._metrics = Metrics()
        self._access = Access(self._metrics.requests)
        self._cache = Cache()
        self._queue = WorkQueue()
        self._health = Health(options.stall_s, time.monotonic)
        self._known = asyncio.Event()
        self._metrics.queue_depth.set_function(lambda: len(self._queue))
        self._metrics.resources.set_function(lambda: sum(1 for _ in self._cache.resources()))

    async def run(self) -> None:
        """Runs until told to end. Raises kopf.LoginError, UnservedError, and OSError for ports in use."""
        options = self._options
        health = health_routes(self._health.stalled, self._health.unready)
        async with (
            serving(options.health_port, health),
            serving(options.metrics_port, metrics_routes(self._metrics.registry)),
            self._api() as api,
            self._api() as election_api,
        ):
            versions = await self._discover(api)
            kinds = (*child_kinds(versions), POD)
            watches = Watches(
                self._cache, self._health, kinds, options.namespaces, self._queue.add, self._known.set
            )
            self._access.listen(watches)
            # The chart tells a pod its namespace, in which the Lease lies too.
            context = RenderContext(
                versions, options.images, options.lease_namespace, options.prometheus_address
            )
            usage = UsagePoller(self._cache, self._metrics, options.usage_interval_s, self._queue.add)
            load = LoadPoller(
                self._cache, options.load_interval_s, options.bottleneck_s, self._queue.add, self._teller(api)
            )
            reconciler = Reconciler(self._cache, api, context, usage.latest, load.latest)
            watching = kopf.operator(
                registry=watches.registry(self._access),
                settings=kopf_settings(kinds, options.stall_s),
                # kopf's own would need the user's name, and a pod's numeric user has none.
                identity=options.identity,
                standalone=True,
                clusterwide=not options.namespaces,
                namespaces=options.namespaces,
            )
            acting = self._acting(election_api, lambda: self._act(reconciler, usage, load))
            await _first_of(watching, acting)

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[Api]:
        api = Api(self._access.session(), self._access.info.server)
        try:
            yield api
        finally:
            await api.close()

    async def _discover(self, api: Api) -> ServedVersions:
        """What the API server serves, once it serves our resource."""
        while True:
            try:
                groups = await api.get("/apis")
                ours = await api.get(f"/apis/{RESOURCE.api_version}")
                names = [one["name"] for one in ours["resources"]] if ours is not None else []
                if groups is not None and RESOURCE.plural in names:
                    return choose_versions(groups["groups"])
                log.warning("waiting for the definition", extra={"kind": RESOURCE.kind})
            except ApiError as error:
                log.warning("waiting for the API server", extra={"error": str(error)})
            await asyncio.sleep(_DISCOVERY_RETRY_S)

    async def _acting(self, api: Api, act: Callable[[], Awaitable[None]]) -> None:
        options = self._options
        if options.lease_name is None:
            await act()
            return
        namespace = options.lease_namespace or self._access.info.default_namespace or "default"
        await Election(api, namespace, options.lease_name, options.identity).lead(act)

    def _teller(self, api: Api) -> Tell:
        recorder = Recorder(api)

        async def tell(key: Key, note: Note) -> None:
            resource = self._cache.resource(key)
            if resource is not None:
                await recorder.tell(resource, note, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

        return tell

    async def _act(self, reconciler: Reconciler, usage: UsagePoller, load: LoadPoller) -> None:
        """What the one acting replica does: looks at whatever changed, and at everything now and then."""
        await self._known.wait()
        self._metrics.leader.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(WORKERS):
                    group.create_task(self._work(reconciler))
                group.create_task(self._tick())
                group.create_task(usage.run())
                group.create_task(load.run())
        finally:
            self._metrics.leader.set(0)

    async def _tick(self) -> None:
        while True:
            for key in self._cache.resources():
                self._queue.add(key)
            self._metrics.ticks.inc()
            await asyncio.sleep(self._options.tick_s)

    async def _work(self, reconciler: Reconciler) -> None:
        while True:
            key = await self._queue.get()
            self._health.begin(key)
            try:
                with self._metrics.seconds.time():
                    result = await self._reconcile(reconciler, key)
            except asyncio.CancelledError:
                # No longer leading: whoever leads next begins anew.
                self._queue.done(key)
                raise
            finally:
                self._health.end(key)
            self._metrics.reconciles.labels(result.value).inc()
            if result is Result.FAILED:
                self._queue.failed(key)
            else:
                self._queue.done(key)
            if self._cache.resource(key) is None:
                self._queue.forget(key)

    async def _reconcile(self, reconciler: Reconciler, key: Key) -> Result:
        try:
            return await reconciler.reconcile(key)
        except ApiError as error:
            log.warning("reconcile failed", extra={"resource": str(key), "error": str(error)})
        except Exception:
            log.exception("reconcile failed", extra={"resource": str(key)})
        return Result.FAILED


async def _first_of(*work: Awaitable[None]) -> None:
    """Runs all until one ends, then ends the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
