"""Services: one address for clients, and one list of pods for each role."""

from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..roles import roles_of
from .labels import child, namespace, selector
from .pods import PORT, PORT_NAME
from .proxy import COMPONENT as PROXY


def services(deployment: EPDDeployment) -> list[dict[str, Any]]:
    """A headless Service a role, whose EndpointSlices the proxy reads, and the proxy's."""
    roles = [_service(deployment, name, PORT, headless=True) for name, _ in roles_of(deployment)]
    return [*roles, _service(deployment, PROXY, deployment.spec.proxy.port, headless=False)]


def endpoint(deployment: EPDDeployment) -> str:
    """The address that clients in the cluster talk to."""
    host = f"{child_name(deployment.metadata.name, PROXY)}.{namespace(deployment)}.svc"
    return f"http://{host}:{deployment.spec.proxy.port}"


def _service(deployment: EPDDeployment, component: str, port: int, *, headless: bool) -> dict[str, Any]:
    manifest = child(deployment, "v1", "Service", component, component)
    manifest["spec"] = {
        "type": "ClusterIP",
        "selector": selector(deployment.metadata.name, component),
        "ports": [{"name": PORT_NAME, "port": port, "targetPort": PORT_NAME, "protocol": "TCP"}],
    }
    if headless:
        manifest["spec"]["clusterIP"] = "None"
        # Only ready pods get requests. False is the default and is left out by the API server.
    return manifest
