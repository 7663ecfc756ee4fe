"""Who may reach the pods, and how many may be taken away at once."""

from typing import Any

from ..api import EPDDeployment
from ..roles import TRAITS, roles_of
from .affinity import JANITOR
from .context import ServedVersions
from .labels import child, components_selector, selector
from .pods import PORT
from .proxy import COMPONENT as PROXY
from .serving import ACCOUNT as ENGINE

OPERATOR_LABEL = "epd.dev/operator"
"""`true` on the operator's own pods and the metrics adapter's."""
METRICS_LABEL = "epd.dev/metrics"
"""`true` on namespaces whose pods may collect metrics."""
_NETWORKING = "networking.k8s.io/v1"
_NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def disruption_budgets(deployment: EPDDeployment, versions: ServedVersions) -> list[dict[str, Any]]:
    """A budget for each role and for the proxy: a node can be drained, one pod of a kind after another."""
    components = [*(name for name, _ in roles_of(deployment)), PROXY]
    return [_disruption_budget(deployment, component, versions.policy) for component in components]


def network_policies(deployment: EPDDeployment, operator_namespace: str | None) -> list[dict[str, Any]]:
    """Engines are reached by the proxy and the operator, who asks for their metrics, the janitor by the
    operator, both by metrics collectors; the proxy by all. What pods reach is left open.

    Probes come from the pod's own node, which these policies do not keep out. A user's own policies
    add to these.
    """
    return [
        _engine_policy(deployment, operator_namespace),
        _proxy_policy(deployment),
        _janitor_policy(deployment, operator_namespace),
    ]


def _disruption_budget(deployment: EPDDeployment, component: str, version: str) -> dict[str, Any]:
    manifest = child(deployment, version, "PodDisruptionBudget", component, component)
    manifest["spec"] = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": selector(deployment.metadata.name, component)},
    }
    if version == "policy/v1":
        # A pod that crash-loops must not hold up the draining of its node.
        manifest["spec"]["unhealthyPodEvictionPolicy"] = "AlwaysAllow"
    return manifest


def _engine_policy(deployment: EPDDeployment, operator_namespace: str | None) -> dict[str, Any]:
    name = deployment.metadata.name
    roles = [role for role, _ in roles_of(deployment)]
    proxies = {"podSelector": {"matchLabels": selector(name, PROXY)}}
    ingress: list[dict[str, Any]] = [
        {"from": [proxies, _operators(operator_namespace), _collectors()], "ports": [_http_port()]}
    ]
    if deployment.spec.kv_transfer_type == "nixl":
        # NIXL's handshake and data go straight between the two roles, by ports that it picks.
        ends = [role for role in roles if TRAITS[role].kv_role is not None]
        ingress.append({"from": [{"podSelector": components_selector(name, ends)}]})
    manifest = child(deployment, _NETWORKING, "NetworkPolicy", ENGINE, ENGINE)
    manifest["spec"] = {
        "podSelector": components_selector(name, roles),
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return manifest


def _proxy_policy(deployment: EPDDeployment) -> dict[str, Any]:
    manifest = child(deployment, _NETWORKING, "NetworkPolicy", PROXY, PROXY)
    manifest["spec"] = {
        "podSelector": {"matchLabels": selector(deployment.metadata.name, PROXY)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [_http_port()]}],
    }
    return manifest


def _janitor_policy(deployment: EPDDeployment, operator_namespace: str | None) -> dict[str, Any]:
    manifest = child(deployment, _NETWORKING, "NetworkPolicy", JANITOR, JANITOR)
    manifest["spec"] = {
        "podSelector": {"matchLabels": selector(deployment.metadata.name, JANITOR)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [_operators(operator_namespace), _collectors()], "ports": [_http_port()]}],
    }
    return manifest


def _operators(namespace: str | None) -> dict[str, Any]:
    """The operator's pods and the metrics adapter's."""
    where = {} if namespace is None else {"matchLabels": {_NAMESPACE_LABEL: namespace}}
    return {"podSelector": {"matchLabels": {OPERATOR_LABEL: "true"}}, "namespaceSelector": where}


def _collectors() -> dict[str, Any]:
    """Metrics collectors, by namespace: who may label one decides, and without a label there are none."""
    return {"namespaceSelector": {"matchLabels": {METRICS_LABEL: "true"}}}


def _http_port() -> dict[str, Any]:
    """By number: not every network plugin resolves a port's name."""
    return {"port": PORT, "protocol": "TCP"}
