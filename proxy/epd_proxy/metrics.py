"""Prometheus metrics of one proxy process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """All series, in a registry of their own so that two proxies can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "epd_proxy_requests",
            "Chat completions by HTTP status (499: the client left) and the stage that decided it",
            ["status", "stage"],
            registry=registry,
        )
        self.in_flight = Gauge("epd_proxy_in_flight", "Chat completions being served", registry=registry)
        self.ttft = Histogram(
            "epd_proxy_ttft_seconds",
            "From the request's head to the first event (streams) or the answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.media_items = Counter(
            "epd_proxy_media_items",
            "Media items that clients asked about, also those that no encoder was there for",
            registry=registry,
        )
        self.primers = Counter(
            "epd_proxy_primers", "Primer calls sent to encoders, retries included", registry=registry
        )
        self.primed_items = Counter(
            "epd_proxy_primed_items", "Media items answered by encoders", registry=registry
        )
        self.primer_seconds = Histogram(
            "epd_proxy_primer_seconds", "One primer call", buckets=_SECONDS, registry=registry
        )
        self.primer_wait = Histogram(
            "epd_proxy_primer_wait_seconds",
            "What one request with media waits for all its primers",
            buckets=_SECONDS,
            registry=registry,
        )
        self.shared = Counter(
            "epd_proxy_single_flight_hits",
            "Items that joined the primer of another request",
            registry=registry,
        )
        self.recent = Counter(
            "epd_proxy_recent_hits", "Items encoded a moment ago that skipped the encoder", registry=registry
        )
        self.reprimes = Counter(
            "epd_proxy_reprimes", "Requests encoded again after an encoder cache miss", registry=registry
        )
        self.prefill_seconds = Histogram(
            "epd_proxy_prefill_seconds",
            "What one request waits for its prefill, retries included",
            buckets=_SECONDS,
            registry=registry,
        )
        self.reprefills = Counter(
            "epd_proxy_reprefills",
            "Requests prefilled again since their KV did not reach a decode instance",
            registry=registry,
        )
        self.retries = Counter(
            "epd_proxy_retries", "Calls repeated on another instance", ["role"], registry=registry
        )
        self.upstream_errors = Counter(
            "epd_proxy_upstream_errors",
            "Failed calls by role and kind of failure",
            ["role", "kind"],
            registry=registry,
        )
        self.instances = Gauge("epd_proxy_instances", "Instances known", ["role"], registry=registry)
        self.instances_ready = Gauge(
            "epd_proxy_instances_ready", "Instances that get traffic", ["role"], registry=registry
        )
        self.buffered = Gauge(
            "epd_proxy_buffered_bytes", "Bytes of request bodies held in memory", registry=registry
        )
        self.key_requests = Counter(
            "epd_proxy_key_requests",
            "Chat completions by API key (its name) and tenant, from the file of keys",
            ["key", "tenant"],
            registry=registry,
        )

    def discovery(self) -> DiscoveryMetrics:
        """The series of a proxy that asks an API server; another one has none of them."""
        return DiscoveryMetrics(self.registry)


class DiscoveryMetrics:
    """The watch of EndpointSlices."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.watch_up = Gauge(
            "epd_proxy_watch_up",
            "1 while instances follow the API server, 0 while the last known ones are used",
            registry=registry,
        )
        self.watch_restarts = Counter(
            "epd_proxy_watch_restarts",
            "Lost watches, each followed by a new list, by reason: lost, silent, expired (410), refused",
            ["reason"],
            registry=registry,
        )
