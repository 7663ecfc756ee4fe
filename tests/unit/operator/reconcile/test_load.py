"""How full roles are: when it is written down, and when somebody is told."""

from typing import Any

from epd_operator.api import EPDDeployment
from epd_operator.status.compute import Observed, compute_status
from epd_operator.status.load import Bottleneck, Load, load_summary, reported_load

NOW = "2026-01-31T12:00:00Z"


def load(percent: int, replicas: int = 2) -> Load:
    return Load(percent, "epd_engine_queued_media_tokens", 40.96 * percent, 4096, replicas)


def test_only_news_are_written() -> None:
    assert reported_load(None, load(7)) == 7
    assert reported_load(50, load(59)) == 50
    assert reported_load(50, load(60)) == 60
    assert reported_load(95, load(101)) == 101, "full is news"
    assert reported_load(103, load(98)) == 98
    assert reported_load(50, None) is None, "nobody says anything any more"


def test_the_summary_names_the_roles_that_say_something() -> None:
    assert load_summary({"encoder": 85, "pd": 40}) == "E 85% PD 40%"
    assert load_summary({"encoder": None, "prefill": 0, "decode": 120}) == "P 0% D 120%"
    assert load_summary({"encoder": None, "pd": None}) is None


def test_a_bottleneck_is_told_of_once_with_its_numbers() -> None:
    watch = Bottleneck(300)
    busy = {"encoder": load(180), "pd": load(35)}
    assert watch.look(busy, 0) is None
    assert watch.look(busy, 299) is None
    note = watch.look(busy, 300)
    assert note is not None
    assert (note.type, note.reason) == ("Warning", "Bottleneck")
    assert note.message == (
        "encoder has been the bottleneck for 5 minutes, 180% full: epd_engine_queued_media_tokens is 7372.8 "
        "a replica, of 4096, with 2 replicas (beside it: pd 35%)"
    )
    assert watch.look(busy, 900) is None


def test_it_counts_anew_when_it_ends_or_another_role_is_fuller() -> None:
    watch = Bottleneck(300)
    assert watch.look({"encoder": load(120), "pd": load(35)}, 0) is None
    assert watch.look({"encoder": load(90), "pd": load(35)}, 200) is None
    assert watch.look({"encoder": load(120), "pd": load(35)}, 400) is None
    assert watch.look({"encoder": load(120), "pd": load(150)}, 600) is None
    assert watch.look({"encoder": load(120), "pd": load(150)}, 800) is None
    note = watch.look({"encoder": load(120), "pd": load(150)}, 900)
    assert note is not None
    assert note.message.startswith("pd has been")
    assert watch.look({}, 1000) is None
    assert watch.look({"pd": load(150)}, 1100) is None
    assert watch.look({"pd": load(150, replicas=1)}, 1400) is not None, "it is news again"


def status_of(loads: dict[str, Load] | None, before: dict[str, Any] | None = None) -> Any:
    resource: dict[str, Any] = {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": "demo", "namespace": "ns", "uid": "1", "generation": 1},
        "spec": {"model": {"source": "/m"}, "roles": {"encoder": {}, "pd": {"replicas": 1}}},
    }
    deployment = EPDDeployment.model_validate(resource)
    scaler = {
        "metadata": {"name": "mine"},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "demo-pd"}},
    }
    resource["status"] = before or {}
    return compute_status(Observed(resource, deployment, loads=loads, scalers=[scaler]), NOW)


def test_the_status_has_loads_and_keeps_them_until_somebody_was_asked() -> None:
    first = status_of({"encoder": load(85), "pd": load(40)})
    assert first["roles"]["encoder"]["load"] == 85
    assert first["roles"]["load"] == "E 85% PD 40%"
    assert status_of(None, first)["roles"]["load"] == "E 85% PD 40%", "this operator has just begun"
    assert "load" not in status_of({}, first)["roles"]


def test_the_status_names_two_scalers() -> None:
    conditions = {one["type"]: one for one in status_of(None)["conditions"]}
    assert conditions["Degraded"]["status"] == "True"
    assert "HorizontalPodAutoscaler mine" in conditions["PDReady"]["message"]
    assert "mine" not in conditions["EncoderReady"]["message"]
