"""A Deployment around a pod template."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..api import EPDDeployment, Workload
from .labels import child, selector
from .pods import progress_deadline_seconds, template_hash

SPEC_HASH_ANNOTATION = "epd.dev/spec-hash"
"""Changes when the role's pods do. On the Deployment, since on the pods it would itself restart them."""
REVISION_HISTORY = 5


def deployment_of(
    deployment: EPDDeployment, component: str, workload: Workload, template: dict[str, Any]
) -> dict[str, Any]:
    """The Deployment of a component. It has `replicas` only where the resource owns them."""
    manifest = child(deployment, "apps/v1", "Deployment", component, component)
    manifest["metadata"]["annotations"] = {SPEC_HASH_ANNOTATION: template_hash(template)}
    manifest["spec"] = {
        "selector": {"matchLabels": selector(deployment.metadata.name, component)},
        "strategy": _strategy(workload, template),
        "progressDeadlineSeconds": progress_deadline_seconds(workload),
        "revisionHistoryLimit": REVISION_HISTORY,
        "template": template,
    }
    if workload.replicas is not None:
        manifest["spec"]["replicas"] = workload.replicas
    return manifest


def extended_resources(containers: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names of the devices that containers ask for (`nvidia.com/gpu`): resources of a vendor's domain."""
    return {
        name
        for container in containers
        for amounts in container.get("resources", {}).values()
        if isinstance(amounts, Mapping)
        for name, amount in amounts.items()
        if "/" in name and str(amount) != "0"
    }


def _strategy(workload: Workload, template: Mapping[str, Any]) -> dict[str, Any]:
    """The rollout: the user's, or by what a replica takes.

    A node has few devices, so a surge pod would wait for one for ever; without devices nothing is lost by
    starting the new pod first.
    """
    if workload.strategy is not None and workload.strategy.type == "Recreate":
        return {"type": "Recreate"}
    if workload.strategy is not None and workload.strategy.rolling_update is not None:
        limits = workload.strategy.rolling_update.model_dump(by_alias=True)
    else:
        spec = template["spec"]
        has_devices = bool(extended_resources(spec["containers"])) or bool(spec.get("resourceClaims"))
        limits = {"maxSurge": 0, "maxUnavailable": 1} if has_devices else {"maxSurge": 1, "maxUnavailable": 0}
    return {"type": "RollingUpdate", "rollingUpdate": limits}
