"""What roles are scaled by: names of metrics, how each is read from the pods, and when a replica is full."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

PROXY = "proxy"

Reading = Literal["gauge", "rate", "p95"]
"""A gauge's mean over the window, a counter's increase a second, or the 95th percentile of a histogram."""
Together = Literal["sum", "mean", "merged"]
"""What a role's value is: the sum or the mean of its pods', or the percentile of all they have seen."""


@dataclass(frozen=True)
class Signal:
    """One metric of the metrics APIs, and of Prometheus where that scrapes the pods."""

    name: str
    roles: tuple[str, ...]
    """Whose load it says something about."""
    reading: Reading
    sources: tuple[tuple[str, ...], ...]
    """Series of a pod, by engine: the first alternative that a pod has counts, its series added up."""
    together: Together
    full: float | None = None
    """The mean per replica at which one is full; None where that depends on what is promised to clients."""
    component: str | None = None
    """Whose pods have it, where that is not the role itself."""


_LANGUAGE = ("pd", "prefill", "decode")
_ALL = ("encoder", *_LANGUAGE)

SIGNALS = (
    Signal(
        "epd_engine_queued_media_tokens",
        ("encoder",),
        "gauge",
        (("epd_engine_queued_media_tokens",),),
        "sum",
        full=4096,
    ),
    Signal(
        "epd_engine_queued_prompt_tokens",
        ("prefill", "pd"),
        "gauge",
        (("epd_engine_queued_prompt_tokens",),),
        "sum",
        full=8192,
    ),
    Signal(
        "epd_engine_requests_in_progress",
        _ALL,
        "gauge",
        (("epd_engine_requests_in_progress",), ("vllm:num_requests_running", "vllm:num_requests_waiting")),
        "sum",
        full=48,
    ),
    Signal(
        "epd_engine_requests_running",
        _ALL,
        "gauge",
        (("epd_engine_requests_running",), ("vllm:num_requests_running",)),
        "sum",
    ),
    Signal(
        "epd_engine_requests_waiting",
        _ALL,
        "gauge",
        (("epd_engine_requests_waiting",), ("vllm:num_requests_waiting",)),
        "sum",
    ),
    Signal(
        "epd_engine_kv_cache_usage_ratio",
        _LANGUAGE,
        "gauge",
        (("epd_engine_kv_cache_usage_ratio",), ("vllm:kv_cache_usage_perc",)),
        "mean",
        full=0.8,
    ),
    Signal(
        "epd_engine_utilization_ratio",
        _ALL,
        "rate",
        (("epd_engine_busy_seconds_total",),),
        "mean",
        full=0.8,
    ),
    Signal(
        "epd_engine_time_to_first_token_seconds_p95",
        _LANGUAGE,
        "p95",
        (("epd_engine_time_to_first_token_seconds",), ("vllm:time_to_first_token_seconds",)),
        "merged",
    ),
    Signal(
        "epd_engine_inter_token_seconds_p95",
        ("pd", "decode"),
        "p95",
        (("epd_engine_inter_token_seconds",), ("vllm:inter_token_latency_seconds",)),
        "merged",
    ),
    Signal(
        "epd_proxy_primer_wait_seconds_p95",
        ("encoder",),
        "p95",
        (("epd_proxy_primer_wait_seconds",),),
        "merged",
        component=PROXY,
    ),
    Signal(
        "epd_proxy_media_items_per_second",
        ("encoder",),
        "rate",
        (("epd_proxy_media_items_total",),),
        "sum",
        component=PROXY,
    ),
)

BY_NAME = {signal.name: signal for signal in SIGNALS}

WAKE = "epd_proxy_media_items_per_second"
"""What can be seen of encoders that are not there: pictures that clients ask about."""
WAKE_FULL = 4
"""Items a second for which one encoder is wanted."""

_OWN = {
    "native": {
        "encoder": ("epd_engine_queued_media_tokens",),
        "pd": ("epd_engine_requests_in_progress", "epd_engine_kv_cache_usage_ratio"),
        "prefill": ("epd_engine_queued_prompt_tokens",),
        "decode": ("epd_engine_requests_in_progress", "epd_engine_kv_cache_usage_ratio"),
    },
    # It counts no tokens that wait.
    "vllm": {
        "encoder": ("epd_engine_requests_in_progress",),
        "pd": ("epd_engine_requests_in_progress", "epd_engine_kv_cache_usage_ratio"),
        "prefill": ("epd_engine_requests_in_progress",),
        "decode": ("epd_engine_requests_in_progress", "epd_engine_kv_cache_usage_ratio"),
    },
}


def own_signals(engine: str, role: str) -> Iterator[tuple[Signal, float]]:
    """What a role is scaled by where nobody says otherwise, each with the mean per replica that is held."""
    for name in _OWN[engine][role]:
        signal = BY_NAME[name]
        assert signal.full is not None
        yield signal, signal.full


def pod_signals(component: str) -> Iterator[Signal]:
    """What is read from the pods of a component."""
    for signal in SIGNALS:
        if component == signal.component or (signal.component is None and component in signal.roles):
            yield signal
