"""Which pods must share a node."""

from typing import Any

from ..api import EPDDeployment
from ..roles import TRAITS, roles_of
from .labels import components_selector

JANITOR = "janitor"
"""The janitor's component."""


def beside_the_memory(deployment: EPDDeployment) -> dict[str, Any]:
    """Affinity of the pods that share a store in memory: one node, whichever the first of them goes to."""
    if deployment.spec.ec_store.shared_memory is None:
        return {}
    sharing = [role for role, _ in roles_of(deployment) if TRAITS[role].ec_role is not None]
    term = {
        "labelSelector": components_selector(deployment.metadata.name, [*sharing, JANITOR]),
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
