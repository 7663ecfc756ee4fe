"""What is read from a pod's /metrics, whoever wrote it."""

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from epd_operator.metrics_adapter.exposition import MOST_BYTES, read_exposition


def test_series_are_added_up_over_their_labels_and_the_rest_is_not_looked_at() -> None:
    text = b"""# HELP vllm:num_requests_running Requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a, b} \\"",engine="0"} 2.0
vllm:num_requests_running{model_name="b",engine="1"} 3 1700000000000
other_metric this line is nonsense
epd_engine_requests_running 1e0
"""
    wanted = {"vllm:num_requests_running", "epd_engine_requests_running"}
    found = read_exposition(text, wanted)
    assert found.values == {"vllm:num_requests_running": 5.0, "epd_engine_requests_running": 1.0}
    assert found.buckets == {}


def test_what_the_prometheus_client_writes_is_read_back() -> None:
    registry = CollectorRegistry()
    Gauge("depth", "d", ["shard"], registry=registry).labels("x").set(7.5)
    histogram = Histogram("wait_seconds", "w", ["model"], buckets=(0.1, 1), registry=registry)
    for model, value in (("a", 0.05), ("a", 0.5), ("b", 30)):
        histogram.labels(model).observe(value)
    found = read_exposition(generate_latest(registry), {"depth", "wait_seconds"})
    assert found.values == {"depth": 7.5}
    assert found.buckets == {"wait_seconds": {0.1: 1.0, 1.0: 2.0, float("inf"): 3.0}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"depth NaN\n", "no amount"),
        (b"depth -1\n", "no amount"),
        (b"depth +Inf\n", "no amount"),
        (b"depth one\n", "could not convert"),
        (b"depth\n", "no sample"),
        (b'depth{a="b" 3\n', "no sample"),
        (b"depth \xff\n", "codec can't decode"),
        (b'depth_bucket{le="often"} 3\n', "could not convert"),
        (b"".join(b'depth_bucket{le="%d"} 1\n' % n for n in range(300)), "more than 256 buckets"),
        (b"#" * (MOST_BYTES + 1), "is longer than"),
    ],
)
def test_what_cannot_be_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_exposition(text, {"depth"})
