"""The metrics adapter as a whole."""

import asyncio
import logging
import ssl
from datetime import timedelta

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, PlatformCollector, ProcessCollector

from ..apply.api import Api, ApiError
from ..handlers.access import Access
from ..handlers.server import health_routes, metrics_routes, serving
from .access import Authenticator, Authorizer
from .authority import SharedAuthority
from .certificates import Pair, is_due, sign, utc_now
from .options import AdapterOptions
from .pods import PodWatch
from .readings import Readings
from .scraper import Scraper
from .server import MetricsApi
from .tls import Tls
from .trust import FrontProxy, read_front_proxy

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_SHUTDOWN_S = 5.0
_NOBODY = FrontProxy("", frozenset(), (), (), ())


class MetricsAdapter:
    """One replica; `run` is its whole life. Replicas need nothing of each other but the authority."""

    def __init__(self, options: AdapterOptions) -> None:
        self._options = options
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        requests = Counter(
            "epd_metrics_adapter_requests",
            "Requests to the API server by verb, resource and code.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self._looks = Counter(
            "epd_metrics_adapter_looks",
            "Times a pod was asked for its metrics: ok, or failed.",
            ["result"],
            registry=registry,
        )
        self._access = Access(requests)
        self._tls = Tls()
        self._front = _NOBODY
        self._serving: Pair | None = None
        self._signed_by: Pair | None = None

    async def run(self) -> None:
        """Runs until told to end. Raises kopf.LoginError, and OSError for ports in use."""
        options = self._options
        api = Api(self._access.session(), self._access.info.server)
        session = self._access.session()
        watch = PodWatch(session, self._access.info.server, options.namespaces)
        scraper = Scraper(watch.pods, options.pace, self._count)
        Gauge("epd_metrics_adapter_pods", "Pods that are asked.", registry=self._registry).set_function(
            lambda: len(watch.pods())
        )

        def unready() -> list[str]:
            found = [] if self._tls.is_ready else ["there is no serving certificate yet"]
            if not watch.is_complete:
                found.append("pods were not listed yet")
            elif scraper.rounds == 0:
                found.append("pods were not asked yet")
            return found

        authority = SharedAuthority(api, options.namespace, options.secret, options.groups)
        metrics_api = MetricsApi(
            Readings(watch.pods, scraper),
            Authenticator(api),
            Authorizer(api),
            lambda: self._front,
            unready,
            options.groups,
        )
        runner = web.AppRunner(metrics_api.application(), access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=options.port, ssl_context=self._tls.context).start()
            async with (
                serving(options.health_port, health_routes(list, unready)),
                serving(options.metrics_port, metrics_routes(self._registry)),
                asyncio.TaskGroup() as group,
            ):
                group.create_task(watch.run())
                group.create_task(self._scrape_once_listed(watch, scraper))
                group.create_task(self._keep_trusted(api, authority))
        finally:
            await runner.cleanup()
            await session.close()
            await api.close()

    def _count(self, is_well: bool) -> None:
        self._looks.labels("ok" if is_well else "failed").inc()

    async def _scrape_once_listed(self, watch: PodWatch, scraper: Scraper) -> None:
        await watch.wait_complete()
        await scraper.run()

    async def _keep_trusted(self, api: Api, authority: SharedAuthority) -> None:
        """Looks now and then whom the API server trusts, and whether it trusts us."""
        while True:
            try:
                self._renew(await authority.look(), await read_front_proxy(api))
            except (ApiError, ValueError, ssl.SSLError) as error:
                log.warning("certificates are not looked after", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(self._options.look_s)

    def _renew(self, authority: Pair, front: FrontProxy) -> None:
        now, options = utc_now(), self._options
        is_new = (
            self._serving is None or self._signed_by != authority or is_due(self._serving.certificate, now)
        )
        if not is_new and front == self._front:
            return
        if self._serving is None or is_new:
            where = f"{options.service}.{options.namespace}.svc"
            names = [where, f"{where}.cluster.local"]
            self._serving = sign(authority, names, now, timedelta(seconds=options.certificate_s))
            self._signed_by = authority
            log.info("a new serving certificate", extra={"made_out_to": where})
        self._tls.use(self._serving, front.authority)
        self._front = front
