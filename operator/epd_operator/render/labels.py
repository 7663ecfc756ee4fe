"""Labels, selectors and owners: how children are found, and whose they are."""

from collections.abc import Sequence
from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name, label_value

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "epd-operator"
DEFAULT_NAMESPACE = "default"


def selector(name: str, component: str) -> dict[str, str]:
    """The labels that select a component's pods. Never more: a Deployment's selector is immutable."""
    return {INSTANCE_LABEL: label_value(name), COMPONENT_LABEL: component}


def labels(name: str, component: str) -> dict[str, str]:
    """The labels of every child."""
    return {NAME_LABEL: "epd", **selector(name, component), MANAGED_BY_LABEL: MANAGED_BY}


def components_selector(name: str, components: Sequence[str]) -> dict[str, Any]:
    """A label selector of the pods of several components."""
    expression = {"key": COMPONENT_LABEL, "operator": "In", "values": list(components)}
    return {"matchLabels": {INSTANCE_LABEL: label_value(name)}, "matchExpressions": [expression]}


def namespace(deployment: EPDDeployment) -> str:
    """The namespace of the resource and its children."""
    return deployment.metadata.namespace or DEFAULT_NAMESPACE


def child(
    deployment: EPDDeployment,
    api_version: str,
    kind: str,
    suffix: str,
    component: str,
    *,
    owned: bool = True,
) -> dict[str, Any]:
    """A child without its content. One that is not `owned` outlives the resource.

    The owner's uid comes from the API server; a document that was never there renders without owners.
    """
    name = deployment.metadata.name
    metadata: dict[str, Any] = {
        "name": child_name(name, suffix),
        "namespace": namespace(deployment),
        "labels": labels(name, component),
    }
    if owned and deployment.metadata.uid is not None:
        metadata["ownerReferences"] = [_owner_reference(deployment, deployment.metadata.uid)]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def _owner_reference(deployment: EPDDeployment, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": deployment.api_version,
        "kind": deployment.kind,
        "name": deployment.metadata.name,
        "uid": uid,
        "controller": True,
        # Deleting the resource must not wait for its children.
        "blockOwnerDeletion": False,
    }
