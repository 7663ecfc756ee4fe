"""Pure: from a resource, and what the cluster and the chart offer, to the manifests of all its children.

`docs/rendering.md` says what is rendered and why.
"""

from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..roles import roles_of
from .autoscaling import autoscalers
from .canonical import by_field_name
from .context import Images, RenderContext, ServedVersions
from .engine import ENGINE_HASH_ANNOTATION, engine_account, engine_deployments
from .errors import RenderError
from .janitor import janitor_deployment
from .labels import labels, selector
from .policies import disruption_budgets, network_policies
from .proxy import proxy_access, proxy_deployment
from .services import endpoint, services
from .store import claim_names, claims
from .workloads import SPEC_HASH_ANNOTATION

__all__ = [
    "ENGINE_HASH_ANNOTATION",
    "SPEC_HASH_ANNOTATION",
    "Images",
    "RenderContext",
    "RenderError",
    "ServedVersions",
    "child_name",
    "claim_names",
    "endpoint",
    "labels",
    "render",
    "roles_of",
    "selector",
]


def render(deployment: EPDDeployment, context: RenderContext) -> list[dict[str, Any]]:
    """All children in the order in which they are to be applied: what others need comes first.

    Equal arguments give equal bytes. Raises RenderError for what cannot be rendered.
    """
    manifests = [
        engine_account(deployment),
        *proxy_access(deployment),
        *network_policies(deployment, context.operator_namespace),
        *claims(deployment),
        *services(deployment),
        *engine_deployments(deployment, context.images),
        proxy_deployment(deployment, context.images),
        janitor_deployment(deployment, context.images),
        *disruption_budgets(deployment, context.versions),
        *autoscalers(deployment, context),
    ]
    return [by_field_name(manifest) for manifest in manifests]
