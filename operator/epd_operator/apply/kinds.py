"""The kinds of children, and where the API server has them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..render import ServedVersions

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of namespaced object."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version within the group."""
        return self.api_version.rpartition("/")[2]

    def collection(self, namespace: str | None) -> str:
        """The path of all objects of the kind, in one namespace or in all."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"

    def path(self, namespace: str, name: str) -> str:
        """The path of one object."""
        return f"{self.collection(namespace)}/{name}"


RESOURCE = Kind("epd.dev/v1alpha1", "EPDDeployment", "epddeployments")
POD = Kind("v1", "Pod", "pods")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")

AUTOSCALER = "HorizontalPodAutoscaler"
SCALERS = frozenset({AUTOSCALER, "ScaledObject"})
"""Kinds of children that write replicas."""


class UnservedError(Exception):
    """The API server lacks a group that children are of."""


def child_kinds(versions: ServedVersions) -> tuple[Kind, ...]:
    """Every kind of which `render` makes children."""
    return (
        Kind("v1", "ServiceAccount", "serviceaccounts"),
        Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
        Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        CLAIM,
        Kind("v1", "Service", "services"),
        DEPLOYMENT,
        Kind(versions.policy, "PodDisruptionBudget", "poddisruptionbudgets"),
        Kind(versions.autoscaling, AUTOSCALER, "horizontalpodautoscalers"),
        *([Kind(versions.keda, "ScaledObject", "scaledobjects")] if versions.keda else []),
    )


# Newest first.
_KNOWN = {
    "autoscaling": ("autoscaling/v2", "autoscaling/v2beta2"),
    "policy": ("policy/v1", "policy/v1beta1"),
    "discovery": ("discovery.k8s.io/v1", "discovery.k8s.io/v1beta1"),
}
_KEDA = "keda.sh/v1alpha1"


def choose_versions(groups: Iterable[Manifest]) -> ServedVersions:
    """The newest version known here of each group, from the `groups` of an APIGroupList.

    Raises UnservedError where the API server serves none of them.
    """
    served = {version["groupVersion"] for group in groups for version in group["versions"]}
    chosen = {}
    for name, known in _KNOWN.items():
        version = next((version for version in known if version in served), None)
        if version is None:
            raise UnservedError(f"the API server serves none of {', '.join(known)}")
        chosen[name] = version
    return ServedVersions(**chosen, keda=_KEDA if _KEDA in served else None)
