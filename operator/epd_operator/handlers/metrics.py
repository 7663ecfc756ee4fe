"""What the operator counts, for Prometheus."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)


class Metrics:
    """All metrics of one operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.reconciles = Counter(
            "epd_operator_reconciles",
            "Reconciles by result: ok, failed (an error is retried) or refused (the spec must change).",
            ["result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "epd_operator_reconcile_seconds",
            "Seconds of one reconcile.",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.requests = Counter(
            "epd_operator_requests",
            "Requests to the API server by verb, resource and code.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "epd_operator_queue_depth", "Resources that wait to be reconciled.", registry=self.registry
        )
        self.ticks = Counter(
            "epd_operator_ticks", "Times at which all resources were looked at.", registry=self.registry
        )
        self.leader = Gauge(
            "epd_operator_leader", "1 where this replica acts, 0 where it waits.", registry=self.registry
        )
        self.usage_looks = Counter(
            "epd_operator_usage_looks",
            "Times a janitor was asked how full its store is: ok, or failed.",
            ["result"],
            registry=self.registry,
        )
        self.resources = Gauge("epd_operator_resources", "EPDDeployments there are.", registry=self.registry)
