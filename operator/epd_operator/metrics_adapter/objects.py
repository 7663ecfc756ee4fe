"""Pure: the objects of the metrics APIs, and of discovery, as Kubernetes' clients read them."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from .pods import Pod
from .readings import Reading
from .signals import SIGNALS

Object = dict[str, Any]

CUSTOM, EXTERNAL = "custom.metrics.k8s.io", "external.metrics.k8s.io"
VERSIONS = {CUSTOM: ("v1beta2", "v1beta1"), EXTERNAL: ("v1beta1",)}
"""The versions of each group, the preferred one first."""


def quantity(value: float) -> str:
    """A number as Kubernetes writes it: whole, or in thousandths, or in smaller parts where it is tiny."""
    for scale, suffix in ((1, ""), (1000, "m"), (10**6, "u")):
        scaled = value * scale
        if scaled == 0 or (scaled >= 1 and math.isclose(scaled, round(scaled), rel_tol=1e-3)):
            return f"{round(scaled)}{suffix}"
    return f"{round(value * 10**9)}n"


def pod_metrics(version: str, metric: str, found: Iterable[tuple[Pod, Reading]]) -> Object:
    """The answer about pods."""
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{CUSTOM}/{version}",
        "metadata": {},
        "items": [_pod_metric(version, metric, pod, reading) for pod, reading in found],
    }


def _pod_metric(version: str, metric: str, pod: Pod, reading: Reading) -> Object:
    described = {"kind": "Pod", "namespace": pod.namespace, "name": pod.name, "apiVersion": "/v1"}
    common = {"describedObject": described, "timestamp": _time(reading.at), "value": quantity(reading.value)}
    seconds = round(reading.seconds)
    if version == "v1beta1":
        return {**common, "metricName": metric, "window": seconds}
    return {**common, "metric": {"name": metric}, "windowSeconds": seconds}


def external_metrics(metric: str, found: Iterable[Reading]) -> Object:
    """The answer about roles."""
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{EXTERNAL}/{VERSIONS[EXTERNAL][0]}",
        "metadata": {},
        "items": [
            {
                "metricName": metric,
                "metricLabels": dict(reading.labels),
                "timestamp": _time(reading.at),
                "window": round(reading.seconds),
                "value": quantity(reading.value),
            }
            for reading in found
        ],
    }


def resources(group: str, version: str) -> Object:
    """What a group version has."""
    listed: list[Object] = []
    for signal in SIGNALS:
        if group == EXTERNAL:
            listed.append(_resource(signal.name, "ExternalMetricValueList"))
        elif signal.component is None:
            listed.append(_resource(f"pods/{signal.name}", "MetricValueList"))
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}",
        "resources": listed,
    }


def _resource(name: str, kind: str) -> Object:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}


def api_group(group: str) -> Object:
    """A group with its versions."""
    versions = [{"groupVersion": f"{group}/{one}", "version": one} for one in VERSIONS[group]]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": group,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def api_groups(groups: Iterable[str]) -> Object:
    """A list of groups."""
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group(group) for group in groups]}


def failure(code: int, reason: str, message: str) -> Object:
    """A Status that says what went wrong."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
