"""The janitor's HTTP side: `/health`, `/ready`, `/usage`, `/metrics`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_engine.ec_store.janitor.service import Service

_SHUTDOWN_SECONDS = 1  # for answers under way


@contextmanager
def listening(service: Service, host: str, port: int) -> Iterator[None]:
    """Answers in a thread of its own while the block runs. Exits where the port is taken.

    The thread ends before the block does: an interpreter that is torn down under it may crash.
    """
    config = uvicorn.Config(create_app(service), host=host, port=port, log_config=None, access_log=False)
    config.timeout_graceful_shutdown = _SHUTDOWN_SECONDS
    bound = config.bind_socket()
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, kwargs={"sockets": [bound]}, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * _SHUTDOWN_SECONDS)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="EC store janitor", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()
    registry.register(_Collector(service))

    @app.get("/health")
    async def health() -> JSONResponse:
        if service.is_stuck:
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        state = "janitor" if service.leading else "standby"
        return JSONResponse({"status": state if service.ready else "starting"}, 200 if service.ready else 503)

    @app.get("/usage")
    async def usage() -> JSONResponse:
        document = _usage(service)
        if document is None:
            return JSONResponse({"detail": "the store was not looked at yet"}, 503)
        return JSONResponse(document)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    return app


def _usage(service: Service) -> dict[str, Any] | None:
    """Of the files, with the memory in front of them beside; of the memory alone where there are no files."""
    memory = None if service.memory is None else asdict(service.memory)
    if service.path is None:
        return memory
    found = service.usage
    if found is None:
        return None
    document = {
        "bytes": found.bytes,
        "entries": found.entries,
        "capacity": found.capacity,
        "oldestSeconds": round(found.oldest_seconds, 3),
        "unfinishedBytes": found.unfinished_bytes,
        "quarantinedBytes": found.quarantined_bytes,
        "quarantinedEntries": found.quarantined_entries,
        "writers": found.writers,
        "creditBytes": found.credit,
        "kvBytes": found.kv_bytes,
        "isJanitor": service.leading,
    }
    return document if memory is None else {**document, "memory": memory}


class _Collector(Collector):
    """Reads the service's numbers at scrape time, so that the janitor never waits for a metric."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("leading", "Whether this process is the store's janitor", float(service.leading))
        yield _gauge("look_seconds", "How long the last look at the store took", service.look_seconds)
        memory = service.memory
        if memory is not None:
            yield _gauge("memory_bytes", "Bytes of entries in shared memory", memory.bytes)
            yield _gauge("memory_entries", "Entries in shared memory", memory.entries)
            yield _gauge("memory_capacity_bytes", "Bytes that entries may take there", memory.capacity)
            yield _gauge("memory_committed_bytes", "Memory taken for them", memory.committed)
            yield _gauge("memory_arenas", "Producers that have memory there", memory.arenas)
        usage = service.usage
        if usage is not None:
            yield _gauge("bytes", "Bytes in the store", usage.bytes)
            yield _gauge("entries", "Entries in the store", usage.entries)
            yield _gauge("capacity_bytes", "The store's budget", usage.capacity)
            yield _gauge(
                "oldest_entry_seconds", "Since the last use of the oldest entry", usage.oldest_seconds
            )
            yield _gauge("unfinished_bytes", "Bytes of saves that are not finished", usage.unfinished_bytes)
            yield _gauge("quarantined_bytes", "Bytes of damaged entries", usage.quarantined_bytes)
            yield _gauge("kv_bytes", "Bytes of KV on its way from prefill to decode", usage.kv_bytes)
            yield _gauge("kv_transfers", "Prompts whose KV that is", usage.kv_transfers)
            yield _gauge("writers", "Writers that share the credit", usage.writers)
            yield _gauge("credit_bytes", "What each writer may write until the next look", usage.credit)
        totals = service.totals
        for name, text, values in (
            ("cleared_entries", "Entries deleted", totals.cleared),
            ("cleared_bytes", "Bytes of entries deleted", totals.cleared_bytes),
            ("removed_leftovers", "What else was deleted", totals.removed + service.swept),
        ):
            family = CounterMetricFamily(f"epd_store_{name}", text, labels=["reason"])
            for reason, value in sorted(values.items()):
                family.add_metric([reason], value)
            yield family
        seconds = "Spent on deciding what goes, and on deleting it"
        yield CounterMetricFamily("epd_store_clearing_seconds", seconds, totals.clearing_seconds)
        for name, text, value in (
            ("looks", "Looks at the store", totals.cycles),
            ("quarantined_entries", "Damaged entries set aside", totals.quarantined),
            ("spared_leased", "Deletions put off for a live lease", totals.leased),
            ("refused_deletions", "Deletions that the volume refused", totals.refused),
            ("janitor_errors", "Looks that failed", service.errors),
        ):
            yield CounterMetricFamily(f"epd_store_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"epd_store_{name}", text, value)
