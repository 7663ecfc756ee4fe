"""What vLLM's own Prometheus endpoint says of our store."""

from tests.vllm.client import Deployment, about, ask, picture, prime, until_metric

LOADS, FAILURES = "epd_engine_ec_loads_total", "epd_engine_ec_load_failures_total"
MISSES, SAVES = "epd_engine_ec_misses_total", "epd_engine_ec_saves_total"


def test_metrics_are_at_vllms_own_address_under_our_names(epd: Deployment) -> None:
    loads, failures = epd.pd.metric(LOADS), epd.pd.metric(FAILURES)
    misses, saves = epd.encoder.metric(MISSES), epd.encoder.metric(SAVES)
    (part,) = prime(epd.encoder, epd.model, picture())
    assert ask(epd.pd, epd.model, about(part)).text
    assert not ask(epd.pd, epd.model, about({**part, "uuid": "ef" * 32})).text
    until_metric(epd.pd, LOADS, loads + 1)
    until_metric(epd.pd, FAILURES, failures + 1)
    until_metric(epd.encoder, MISSES, misses + 1)
    until_metric(epd.encoder, SAVES, saves + 1)
    assert epd.pd.metric("epd_engine_ec_load_bytes_total", tier="storage") > 0
