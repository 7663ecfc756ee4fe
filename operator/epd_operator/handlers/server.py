"""The operator's own addresses: health and metrics."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest


@asynccontextmanager
async def serving(port: int, routes: web.RouteTableDef) -> AsyncIterator[None]:
    """Answers on a port while the context lasts; raises OSError when the port is taken."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()


def health_routes(stalled: Callable[[], list[str]], unready: Callable[[], list[str]]) -> web.RouteTableDef:
    """/healthz and /readyz: 200, or 503 and why."""
    routes = web.RouteTableDef()

    @routes.get("/healthz")
    async def healthz(_: web.Request) -> web.Response:
        return _answer(stalled())

    @routes.get("/readyz")
    async def readyz(_: web.Request) -> web.Response:
        return _answer([*unready(), *stalled()])

    return routes


def metrics_routes(registry: CollectorRegistry) -> web.RouteTableDef:
    """/metrics."""
    routes = web.RouteTableDef()

    @routes.get("/metrics")
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


def _answer(complaints: list[str]) -> web.Response:
    if complaints:
        return web.Response(status=503, text="\n".join(complaints) + "\n")
    return web.Response(text="ok\n")
