"""Scalers, beyond what the golden files show."""

import os
import re
from typing import Any

import pytest
import yaml

from epd_operator.metrics_adapter.promql import adapter_rules
from epd_operator.metrics_adapter.signals import BY_NAME, SIGNALS, WAKE, own_signals
from epd_operator.render import RenderContext, RenderError, ServedVersions, render
from epd_operator.roles import TRAITS
from tests.support.digits import ROOT
from tests.unit.operator.render.documents import IMAGES, KEDA_CONTEXT, find, render_case, rendered, resource

RULES = ROOT / "examples" / "prometheus-adapter" / "values.yaml"


def metrics(role: str, **autoscaling: Any) -> list[dict[str, Any]]:
    roles = (
        {"encoder": {}, "prefill": {}, "decode": {}}
        if role in ("prefill", "decode")
        else {"encoder": {}, "pd": {}}
    )
    roles[role] = {"autoscaling": {"maxReplicas": 4, **autoscaling}}
    found: list[dict[str, Any]] = find(
        rendered({"roles": roles}), "HorizontalPodAutoscaler", f"digits-{role}"
    )["spec"]["metrics"]
    return found


@pytest.mark.parametrize("provider", ["builtin", "prometheus-adapter"])
@pytest.mark.parametrize("role", TRAITS)
def test_each_role_is_scaled_by_signals_of_its_own(role: str, provider: str) -> None:
    found = metrics(role, provider=provider)
    assert [one["pods"]["metric"]["name"] for one in found] == [
        one.name for one, _ in own_signals("native", role)
    ]
    assert all(one["pods"]["target"]["type"] == "AverageValue" for one in found)


def test_encoders_that_may_end_are_woken_by_what_proxies_see() -> None:
    assert [one["type"] for one in metrics("encoder", minReplicas=0)] == ["Pods", "External"]
    (wake,) = (one["external"] for one in metrics("encoder", minReplicas=0) if one["type"] == "External")
    assert wake["metric"] == {"name": WAKE, "selector": {"matchLabels": {"deployment": "digits"}}}
    assert BY_NAME[WAKE].component == "proxy", "there are no encoders then"


def test_resources_alone_need_no_metrics_adapter() -> None:
    (cpu,) = metrics("pd", provider="resource")
    assert cpu["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (RenderContext(ServedVersions(), IMAGES), "keda is not installed"),
        (RenderContext(ServedVersions(keda="keda.sh/v1alpha1"), IMAGES), "--prometheus-address"),
    ],
)
def test_keda_needs_itself_and_prometheus(context: RenderContext, words: str) -> None:
    roles = {"encoder": {"autoscaling": {"maxReplicas": 2, "provider": "keda"}}, "pd": {}}
    with pytest.raises(RenderError, match=words) as refused:
        render(resource({"roles": roles}), context)
    assert refused.value.path == "spec.roles.encoder.autoscaling.provider"
    assert find(render(resource({"roles": roles}), KEDA_CONTEXT), "ScaledObject", "digits-encoder")


def test_triggers_are_what_keda_reads() -> None:
    """Every value of a trigger's metadata is text, thresholds are plain numbers, and queries are sums."""
    for role in ("encoder", "pd"):
        spec = find(render_case("keda"), "ScaledObject", f"digits-{role}")["spec"]
        assert set(spec) <= {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers", "advanced"}
        for trigger in spec["triggers"]:
            assert set(trigger) == {"type", "metricType", "metadata"}
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            if trigger["type"] == "prometheus":
                assert float(trigger["metadata"]["threshold"]) > 0
                assert re.fullmatch(r"sum\(.*\)", trigger["metadata"]["query"])
                assert 'namespace="serving"' in trigger["metadata"]["query"]


def test_prometheus_adapters_rules_are_those_of_the_example() -> None:
    """`EPD_UPDATE_GOLDEN=1` writes them anew."""
    comment = (
        "".join(line for line in RULES.read_text().splitlines(True) if line.startswith("#"))
        if RULES.exists()
        else ""
    )
    text = comment + yaml.safe_dump(adapter_rules(), sort_keys=False, width=110)
    if os.environ.get("EPD_UPDATE_GOLDEN") == "1":
        RULES.write_text(text)
    assert RULES.read_text() == text


def test_prometheus_adapter_serves_every_signal_of_ours() -> None:
    rules = yaml.safe_load(RULES.read_text())["rules"]
    assert {one["name"]["as"] for one in rules["external"]} == {signal.name for signal in SIGNALS}
    assert {one["name"]["as"] for one in rules["custom"]} == {
        signal.name for signal in SIGNALS if signal.component is None
    }
