"""From metrics in the autoscaler's shape to KEDA's triggers."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..api import EPDDeployment, quantity_value
from ..metrics_adapter.promql import own_query, sum_of
from ..metrics_adapter.signals import BY_NAME
from .labels import namespace

Object = dict[str, Any]


def triggers(
    deployment: EPDDeployment, role: str, metrics: Sequence[Mapping[str, Any]], prometheus: str
) -> list[Object]:
    """A trigger for each metric."""
    return [_trigger(deployment, role, metric, prometheus) for metric in metrics]


def _trigger(deployment: EPDDeployment, role: str, metric: Mapping[str, Any], prometheus: str) -> Object:
    source = metric[metric["type"].lower()]
    target = source["target"]
    if metric["type"] == "Resource":
        held = target.get("averageUtilization", target.get("averageValue"))
        return {"type": source["name"], "metricType": target["type"], "metadata": {"value": str(held)}}
    # Of what KEDA asks, the autoscaler takes the mean per pod: so the query is the sum.
    held = _plain(target.get("averageValue", target.get("value")))
    name = source["metric"]["name"]
    labels = {
        **source["metric"].get("selector", {}).get("matchLabels", {}),
        "namespace": namespace(deployment),
    }
    if metric["type"] == "Pods":
        labels |= {"deployment": deployment.metadata.name, "role": role}
    signal = BY_NAME.get(name)
    query = sum_of(name, labels) if signal is None else own_query(signal, deployment.spec.engine.type, labels)
    metadata = {"serverAddress": prometheus, "query": query, "threshold": held}
    return {"type": "prometheus", "metricType": target["type"], "metadata": metadata}


def _plain(quantity: str) -> str:
    """A number without a suffix: a threshold is no quantity."""
    return f"{quantity_value(quantity):f}"
