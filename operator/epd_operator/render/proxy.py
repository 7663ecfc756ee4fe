"""The proxy: its Deployment, and what it may read of the cluster."""

from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..roles import roles_of
from .context import Images
from .labels import child, labels, namespace
from .pods import PORT, PodParts, http_get, pod_template, startup_probe
from .workloads import deployment_of

COMPONENT = "proxy"
CONTAINER = "proxy"
API_KEYS_FOLDER = "/etc/epd/api-keys"
API_KEYS_FILE = f"{API_KEYS_FOLDER}/keys.json"
_RBAC = "rbac.authorization.k8s.io"


def proxy_access(deployment: EPDDeployment) -> list[dict[str, Any]]:
    """The proxy's ServiceAccount, and the right to watch the EndpointSlices of its namespace: no more."""
    name = child_name(deployment.metadata.name, COMPONENT)
    account = child(deployment, "v1", "ServiceAccount", COMPONENT, COMPONENT)
    # The pod says by itself that it wants a token.
    account["automountServiceAccountToken"] = False
    role = child(deployment, f"{_RBAC}/v1", "Role", COMPONENT, COMPONENT)
    role["rules"] = [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    binding = child(deployment, f"{_RBAC}/v1", "RoleBinding", COMPONENT, COMPONENT)
    binding["roleRef"] = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, "namespace": namespace(deployment)}]
    return [account, role, binding]


def proxy_deployment(deployment: EPDDeployment, images: Images) -> dict[str, Any]:
    """The proxy's Deployment. Raises RenderError."""
    proxy = deployment.spec.proxy
    name = deployment.metadata.name
    parts = PodParts(
        path="spec.proxy",
        name=CONTAINER,
        image=images.proxy,
        command=_command(deployment),
        service_account=child_name(name, COMPONENT),
        labels=labels(name, COMPONENT),
        probes={
            # /ready waits for a PD, so it must not decide about restarts.
            "startupProbe": startup_probe("/health", proxy),
            "readinessProbe": http_get("/ready", period=2, failures=2, timeout=2),
            "livenessProbe": http_get("/health", period=10, failures=3, timeout=5),
        },
        volumes=[] if proxy.api_keys_secret is None else [_api_keys(proxy.api_keys_secret)],
        mounts=[]
        if proxy.api_keys_secret is None
        else [{"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True}],
        uses_api=True,
    )
    return deployment_of(deployment, COMPONENT, proxy, pod_template(parts, proxy, images))


def _command(deployment: EPDDeployment) -> list[str]:
    proxy = deployment.spec.proxy
    command = ["epd-proxy", "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--drain-timeout", str(proxy.drain_seconds)]
    command += ["--kubernetes-namespace", namespace(deployment)]
    for role, _ in roles_of(deployment):
        command += [f"--{role}-service", child_name(deployment.metadata.name, role)]
    if proxy.api_keys_secret is not None:
        command += ["--api-keys-file", API_KEYS_FILE]
    return command


def _api_keys(secret: str) -> dict[str, Any]:
    """The whole Secret as a folder: the kubelet replaces files in it, which it cannot for a single one.

    It is not optional: a missing Secret keeps the proxy from starting rather than open to all.
    """
    return {"name": "api-keys", "secret": {"secretName": secret, "defaultMode": 0o440}}
