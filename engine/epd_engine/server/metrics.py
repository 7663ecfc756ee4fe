"""Prometheus metrics of one instance, prefix `epd_engine_`."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epd_engine.ec_store.statistics import TransferStats
from epd_engine.engine import Engine

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServerMetrics:
    """What the server observes itself; `attach` adds the engine's own numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "epd_engine_requests",
            "Chat requests by HTTP status and error code",
            ["status", "code"],
            registry=self.registry,
        )
        self.stream_errors = Counter(
            "epd_engine_stream_errors",
            "Streams that began, and ended by an error, by its code",
            ["code"],
            registry=self.registry,
        )
        self.media_decoded = Counter(
            "epd_engine_media_decoded", "Media items decoded", ["modality"], registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "epd_engine_time_to_first_token_seconds",
            "From the request's arrival to its first token, or to the end of encoding",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "epd_engine_inter_token_seconds",
            "Between two tokens of one request",
            buckets=SECONDS,
            registry=self.registry,
        )

    def attach(self, engine: Engine) -> None:
        self.registry.register(_EngineCollector(engine))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's totals at scrape time, so that a step never waits for a metric."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        queued = "media" if engine.config.is_encode_only else "prompt"
        parameters = sum(p.numel() for m in engine.family.modules() for p in m.parameters())
        for name, text, value in (
            ("requests_running", "Requests that hold a place in the batch", engine.scheduler.num_running),
            ("requests_waiting", "Requests that wait for one", engine.scheduler.num_waiting),
            (
                "requests_in_progress",
                "Requests that are not answered yet: running and waiting",
                engine.scheduler.num_running + engine.scheduler.num_waiting,
            ),
            (
                f"queued_{queued}_tokens",
                f"Tokens of {queued} that are still to be computed",
                engine.scheduler.num_queued_tokens,
            ),
            ("kv_cache_usage_ratio", "KV blocks in use, 0 to 1", engine.pool.usage),
            ("encoder_cache_embeddings", "Embeddings resident", engine.encoder_cache.num_used),
            (
                "encoder_cache_referenced_embeddings",
                "Embeddings that a request still needs",
                engine.encoder_cache.num_referenced,
            ),
            (
                "encoder_cache_aside_embeddings",
                "Embeddings evicted to host memory, since a request may need them again",
                engine.encoder_cache.num_aside,
            ),
            ("integrity_problems", "Books that did not balance at the last rest", stats.integrity_problems),
            ("model_parameters", "Parameters loaded for this role", parameters),
        ):
            yield GaugeMetricFamily(f"epd_engine_{name}", text, value)
        encoder = engine.runner.encoder
        for name, text, value in (
            ("steps", "Steps executed", stats.steps),
            ("busy_seconds", "Seconds in which a step was executed", stats.busy_seconds),
            ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens taken over from others", stats.cached_prompt_tokens),
            ("generated_tokens", "Tokens sampled", stats.generated_tokens),
            ("encoder_items", "Media items that went through the tower", encoder.items_encoded),
            ("encoder_embeddings", "Embeddings made by the tower", encoder.embeds_encoded),
            ("ec_external_hits", "Items planned to be loaded from the EC store", stats.ec_hits),
            ("ec_loads", "Items loaded from the EC store", stats.ec_loads),
            ("ec_load_failures", "Items that failed to load", stats.ec_load_failures),
            ("ec_saves", "Items published in the EC store", stats.ec_saves),
            ("ec_save_failures", "Items that could not be published", stats.ec_save_failures),
            ("kv_saves", "Prompts whose KV was saved for a decode instance", stats.kv_saves),
            ("kv_save_failures", "Prompts whose KV could not be saved", stats.kv_save_failures),
            ("kv_loads", "Prompts whose KV was loaded from a prefill instance", stats.kv_loads),
            ("kv_load_failures", "Prompts whose KV could not be loaded", stats.kv_load_failures),
            ("kv_save_bytes", "Bytes of KV saved", engine.kv_statistics().save_bytes),
            ("kv_load_bytes", "Bytes of KV loaded", engine.kv_statistics().load_bytes),
            ("kv_load_seconds", "Seconds spent on loads of KV", engine.kv_statistics().load_seconds),
        ):
            yield CounterMetricFamily(f"epd_engine_{name}", text, value)
        yield from _transfers(engine.ec_statistics())


def _transfers(statistics: Mapping[str, TransferStats]) -> Iterator[Metric]:
    """What went through each tier of the EC store."""
    for name, text in (
        ("load_bytes", "Bytes loaded from the EC store"),
        ("load_seconds", "Seconds spent on loads from the EC store"),
        ("save_bytes", "Bytes published in the EC store"),
        ("save_seconds", "Seconds from a save's begin until it was durable and visible"),
    ):
        family = CounterMetricFamily(f"epd_engine_ec_{name}", text, labels=["tier"])
        for tier, transfers in statistics.items():
            family.add_metric([tier], getattr(transfers, name))
        yield family
