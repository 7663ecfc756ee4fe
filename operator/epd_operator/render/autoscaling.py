"""Who scales the roles that scale by load: HorizontalPodAutoscalers, or KEDA's ScaledObjects."""

from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..api.scaling import Autoscaling, Behavior, Metric
from ..metrics_adapter.signals import WAKE, WAKE_FULL, own_signals
from ..roles import roles_of
from .context import RenderContext
from .errors import RenderError
from .keda import triggers
from .labels import child
from .quantities import canonical_quantity

CPU_UTILIZATION = 80
"""Percent of the request that is held where only CPU and memory are known."""

_QUANTITIES = frozenset({"averageValue", "value", "tolerance"})


def autoscalers(deployment: EPDDeployment, context: RenderContext) -> list[dict[str, Any]]:
    """A scaler for each role with `autoscaling`. Raises RenderError."""
    return [
        _scaled_object(deployment, name, role.autoscaling, context)
        if role.autoscaling.provider == "keda"
        else _autoscaler(deployment, name, role.autoscaling, context.versions.autoscaling)
        for name, role in roles_of(deployment)
        if role.autoscaling is not None
    ]


def _autoscaler(deployment: EPDDeployment, role: str, scaling: Autoscaling, version: str) -> dict[str, Any]:
    manifest = child(deployment, version, "HorizontalPodAutoscaler", role, role)
    manifest["spec"] = {
        "scaleTargetRef": _target(deployment, role),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": _metrics(deployment, role, scaling),
    }
    if scaling.behavior is not None and (behavior := _behavior(scaling.behavior, version)):
        manifest["spec"]["behavior"] = behavior
    return manifest


def _scaled_object(
    deployment: EPDDeployment, role: str, scaling: Autoscaling, context: RenderContext
) -> dict[str, Any]:
    path = f"spec.roles.{role}.autoscaling.provider"
    if context.versions.keda is None:
        raise RenderError(path, "keda is not installed in this cluster (it was not when the operator began)")
    if context.prometheus_address is None:
        raise RenderError(
            path, "keda asks Prometheus, and the operator was not told where that is (--prometheus-address)"
        )
    manifest = child(deployment, context.versions.keda, "ScaledObject", role, role)
    manifest["spec"] = {
        "scaleTargetRef": _target(deployment, role),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "triggers": triggers(
            deployment, role, _metrics(deployment, role, scaling), context.prometheus_address
        ),
    }
    if scaling.behavior is not None and (behavior := _behavior(scaling.behavior, "autoscaling/v2")):
        manifest["spec"]["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": behavior}}
    return manifest


def _target(deployment: EPDDeployment, role: str) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": child_name(deployment.metadata.name, role),
    }


def _metrics(deployment: EPDDeployment, role: str, scaling: Autoscaling) -> list[dict[str, Any]]:
    """What to scale on, in the shape of HorizontalPodAutoscaler v2."""
    if scaling.metrics:
        return [_canonical(_dumped(metric)) for metric in scaling.metrics]
    if scaling.provider == "resource":
        target = {"type": "Utilization", "averageUtilization": CPU_UTILIZATION}
        return [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]
    metrics = [
        {"type": "Pods", "pods": {"metric": {"name": signal.name}, "target": _mean(mean)}}
        for signal, mean in own_signals(deployment.spec.engine.type, role)
    ]
    if scaling.min_replicas == 0:
        selector = {"matchLabels": {"deployment": deployment.metadata.name}}
        wake = {"metric": {"name": WAKE, "selector": selector}, "target": _mean(WAKE_FULL)}
        metrics.append({"type": "External", "external": wake})
    return metrics


def _mean(held: float) -> dict[str, Any]:
    return {"type": "AverageValue", "averageValue": canonical_quantity(held)}


def _behavior(behavior: Behavior, version: str) -> dict[str, Any]:
    rules: dict[str, Any] = _canonical(_dumped(behavior))
    if version == "autoscaling/v2beta2":
        # A cluster that old knows no tolerance, and would refuse the whole object for it.
        for direction in rules.values():
            direction.pop("tolerance", None)
    return {direction: rule for direction, rule in rules.items() if rule}


def _dumped(part: Metric | Behavior) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_none=True)


def _canonical(value: Any) -> Any:
    """Quantities in canonical form, and nothing that is empty: that means the same as absent here."""
    if isinstance(value, dict):
        fields = {
            field: canonical_quantity(item)
            if field in _QUANTITIES and isinstance(item, str)
            else _canonical(item)
            for field, item in value.items()
        }
        return {field: item for field, item in fields.items() if item not in ({}, [])}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value
