"""HorizontalPodAutoscalers of the roles that scale by load."""

from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..api.scaling import Autoscaling, Behavior, Metric
from ..roles import roles_of
from .context import ServedVersions
from .errors import RenderError
from .labels import child
from .quantities import canonical_quantity

OWN_SIGNALS = {
    "encoder": ("epd_encoder_queued_media_tokens", 4096),
    "pd": ("epd_pd_running_requests", 8),
    "prefill": ("epd_prefill_queued_prompt_tokens", 8192),
    "decode": ("epd_pd_running_requests", 8),
}
"""Of each role the metric that says how full a replica is, and its mean per pod that is held."""
CPU_UTILIZATION = 80
"""Percent of the request that is held where only CPU and memory are known."""

_QUANTITIES = frozenset({"averageValue", "value", "tolerance"})


def autoscalers(deployment: EPDDeployment, versions: ServedVersions) -> list[dict[str, Any]]:
    """An autoscaler for each role with `autoscaling`. Raises RenderError."""
    return [
        _autoscaler(deployment, name, role.autoscaling, versions.autoscaling)
        for name, role in roles_of(deployment)
        if role.autoscaling is not None
    ]


def _autoscaler(deployment: EPDDeployment, role: str, scaling: Autoscaling, version: str) -> dict[str, Any]:
    if scaling.provider == "keda":
        raise RenderError(
            f"spec.roles.{role}.autoscaling.provider",
            "keda is not rendered yet; remove `autoscaling` and let your own ScaledObject scale the role",
        )
    target = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": child_name(deployment.metadata.name, role),
    }
    manifest = child(deployment, version, "HorizontalPodAutoscaler", role, role)
    manifest["spec"] = {
        "scaleTargetRef": target,
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [_canonical(_dumped(metric)) for metric in scaling.metrics]
        or [_default_metric(role, scaling.provider)],
    }
    if scaling.behavior is not None and (behavior := _behavior(scaling.behavior, version)):
        manifest["spec"]["behavior"] = behavior
    return manifest


def _default_metric(role: str, provider: str) -> dict[str, Any]:
    if provider == "resource":
        target = {"type": "Utilization", "averageUtilization": CPU_UTILIZATION}
        return {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    metric, mean = OWN_SIGNALS[role]
    held = {"type": "AverageValue", "averageValue": canonical_quantity(mean)}
    return {"type": "Pods", "pods": {"metric": {"name": metric}, "target": held}}


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
