"""What several looks at a pod tell together."""

import pytest

from epd_operator.metrics_adapter.exposition import Exposition
from epd_operator.metrics_adapter.signals import BY_NAME
from epd_operator.metrics_adapter.window import Look, Window, merged, quantile

QUEUED = BY_NAME["epd_engine_queued_media_tokens"]
BUSY = BY_NAME["epd_engine_utilization_ratio"]
TTFT = BY_NAME["epd_engine_time_to_first_token_seconds_p95"]
IN_PROGRESS = BY_NAME["epd_engine_requests_in_progress"]
INF = float("inf")


def window(*looks: tuple[float, Exposition], length: float = 15) -> Window:
    made = Window(length)
    for at, found in looks:
        made.add(Look(at, found))
    return made


def gauge(name: str, value: float) -> Exposition:
    return Exposition({name: value})


def test_a_gauge_is_the_mean_of_the_window_and_old_looks_do_not_count() -> None:
    values = (1000, 10, 20, 30)
    looks = [(100.0 + 5 * n, gauge(QUEUED.name, value)) for n, value in enumerate(values)]
    assert window(*looks).value(QUEUED) == 20
    assert window(*looks[:1]).value(QUEUED) == 1000


def test_a_counter_is_its_growth_a_second_also_over_a_restart_of_the_process() -> None:
    name = "epd_engine_busy_seconds_total"
    looks = [(0.0, gauge(name, 50)), (5.0, gauge(name, 54)), (10.0, gauge(name, 1)), (15.0, gauge(name, 5))]
    assert window(*looks).value(BUSY) == pytest.approx((4 + 1 + 4) / 15)
    assert window(looks[0]).value(BUSY) is None, "one look tells no growth"


def test_a_pod_that_no_longer_has_a_series_has_no_value() -> None:
    assert window((0.0, gauge(QUEUED.name, 5)), (5.0, Exposition())).value(QUEUED) is None
    assert window((0.0, Exposition()), (5.0, gauge(QUEUED.name, 5))).value(QUEUED) == 5


def test_vllms_names_mean_the_same() -> None:
    found = Exposition({"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 4})
    assert window((0.0, found)).value(IN_PROGRESS) == 7
    half = Exposition({"vllm:num_requests_running": 3})
    assert window((0.0, half)).value(IN_PROGRESS) is None


def test_the_95th_percentile_is_of_the_window_alone() -> None:
    slow_before = {0.1: 0.0, 1.0: 0.0, INF: 1000.0}
    after = {0.1: 100.0, 1.0: 100.0, INF: 1100.0}
    name = "epd_engine_time_to_first_token_seconds"
    looks = [(0.0, Exposition({}, {name: slow_before})), (10.0, Exposition({}, {name: after}))]
    assert window(*looks).value(TTFT) == pytest.approx(0.095)
    assert window(looks[0]).value(TTFT) is None
    quiet = [(0.0, Exposition({}, {name: after})), (10.0, Exposition({}, {name: after}))]
    assert window(*quiet).value(TTFT) == 0, "nobody waited"


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ({}, 0),
        ({0.5: 0.0, INF: 0.0}, 0),
        ({1.0: 95.0, 2.0: 100.0, INF: 100.0}, 1.0),
        ({1.0: 90.0, 2.0: 100.0, INF: 100.0}, 1.5),
        ({1.0: 0.0, INF: 10.0}, 1.0),
    ],
)
def test_quantiles_are_prometheus_own(buckets: dict[float, float], expected: float) -> None:
    assert quantile(buckets) == pytest.approx(expected)


def test_pods_are_merged_by_what_they_have_seen_not_by_their_percentiles() -> None:
    quick = {0.1: 980.0, 1.0: 980.0, INF: 980.0}
    slow = {0.1: 0.0, 1.0: 20.0, INF: 20.0}
    assert quantile(merged([quick, slow])) < 0.1
    assert quantile(merged([slow])) > 0.9


def test_no_more_looks_are_kept_than_the_window_needs() -> None:
    made = Window(15)
    for n in range(1000):
        made.add(Look(n * 5.0, gauge(QUEUED.name, n)))
    assert len(made._looks) <= 5
    assert made.seconds == 15
