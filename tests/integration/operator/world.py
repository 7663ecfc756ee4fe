"""The namespace of a test: its resources and their children."""

import base64
import copy
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from kubernetes.client import Configuration

from tests.cluster.fixtures import Namespace
from tests.integration.operator.operators import PATIENCE_S
from tests.support.waiting import eventually

Object = dict[str, Any]
GROUP, VERSION, PLURAL = "epd.dev", "v1alpha1", "epddeployments"

_ROOTS = {
    "deployments": "/apis/apps/v1",
    "services": "/api/v1",
    "serviceaccounts": "/api/v1",
    "persistentvolumeclaims": "/api/v1",
    "pods": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "horizontalpodautoscalers": "/apis/autoscaling/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    PLURAL: f"/apis/{GROUP}/{VERSION}",
}
STABLE_S = 2.0
JSON, MERGE = "application/json", "application/merge-patch+json"
BUDGETS = "poddisruptionbudgets"
CHILDREN = (
    BUDGETS,
    *(name for name in _ROOTS if name not in ("pods", "secrets", "events", "leases", PLURAL)),
)
SPEC: Object = {
    "model": {"source": "/models/digits"},
    "roles": {"encoder": {"replicas": 2}, "pd": {"replicas": 1}},
}


def spec(**changes: Any) -> Object:
    """The least spec of a test, with some fields changed."""
    return {**copy.deepcopy(SPEC), **changes}


class World:
    """A namespace in raw JSON: what the API server stores, nothing else."""

    def __init__(self, namespace: Namespace) -> None:
        self.name = namespace.name
        self.cluster = namespace.cluster
        self._http = _http(namespace.client.configuration)
        groups = self.call("GET", "/apis/policy")["versions"]
        newest = "v1" if any(one["version"] == "v1" for one in groups) else "v1beta1"
        self._roots = _ROOTS | {BUDGETS: f"/apis/policy/{newest}"}

    def close(self) -> None:
        self._http.close()

    def call(
        self, method: str, path: str, body: object = None, content_type: str = JSON, **query: str
    ) -> Object:
        """One request; the parsed answer. Raises httpx.HTTPStatusError."""
        headers = {"Content-Type": content_type}
        content = None if body is None else json.dumps(body)
        answer = self._http.request(method, path, content=content, headers=headers, params=query)
        if answer.is_error:
            raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
        parsed: Object = answer.json()
        return parsed

    def path(self, plural: str, name: str = "") -> str:
        return f"{self._roots[plural]}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")

    def create(self, name: str = "demo", spec: Object = SPEC) -> Object:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "EPDDeployment",
            "metadata": {"name": name},
            "spec": spec,
        }
        return self.call("POST", self.path(PLURAL), body)

    def change(self, change: Object, name: str = "demo") -> Object:
        """A merge patch of the resource's spec."""
        return self.merge(PLURAL, name, {"spec": change})

    def merge(self, plural: str, name: str, change: object) -> Object:
        return self.call("PATCH", self.path(plural, name), change, MERGE)

    def merge_status(self, plural: str, name: str, status: object) -> None:
        path = f"{self.path(plural, name)}/status"
        self.call("PATCH", path, {"status": status}, MERGE)

    def get(self, plural: str, name: str) -> Object | None:
        try:
            found = self.call("GET", self.path(plural, name))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404:
                return None
            raise
        return found

    def listed(self, plural: str, **query: str) -> list[Object]:
        items: list[Object] = self.call("GET", self.path(plural), **query)["items"]
        return items

    def delete(self, plural: str, name: str) -> None:
        self.call("DELETE", self.path(plural, name), propagationPolicy="Background")

    def scale(self, deployment: str, replicas: int) -> None:
        """As `kubectl scale` does it."""
        path = f"{self.path('deployments', deployment)}/scale"
        self.call("PATCH", path, {"spec": {"replicas": replicas}}, MERGE)

    def replicas(self, deployment: str) -> int | None:
        found = self.get("deployments", deployment)
        return None if found is None else int(found["spec"]["replicas"])

    def children(self) -> dict[str, list[Object]]:
        """All objects with our label, by kind."""
        label = "app.kubernetes.io/managed-by=epd-operator"
        return {plural: self.listed(plural, labelSelector=label) for plural in CHILDREN}

    def names(self, plural: str) -> list[str]:
        """Names of the children of one kind."""
        return [one["metadata"]["name"] for one in self.children()[plural]]

    def versions(self, without: str = "") -> dict[str, str]:
        """The version of each child and of each resource: any write changes one."""
        found = self.children() | {PLURAL: self.listed(PLURAL)}
        found.pop(without, None)
        return {
            f"{plural}/{one['metadata']['name']}": one["metadata"]["resourceVersion"]
            for plural, items in found.items()
            for one in items
        }

    def await_settled(self, name: str = "demo") -> None:
        """Waits until all was made that can be made; there is no node, so the pods wait for one."""
        self.await_condition("Ready", "Unschedulable", name)

    def await_stable(self, without: str = "") -> dict[str, str]:
        """Waits until nobody writes any more; the versions then."""
        seen: list[dict[str, str]] = [{}]

        def stable() -> bool:
            time.sleep(STABLE_S)
            seen.append(self.versions(without))
            return seen[-1] == seen[-2]

        self.eventually(stable, lambda: seen[-1])
        return seen[-1]

    def conditions(self, name: str = "demo") -> dict[str, Object]:
        resource = self.get(PLURAL, name) or {}
        return {one["type"]: one for one in resource.get("status", {}).get("conditions", [])}

    def reason(self, condition: str, name: str = "demo") -> str:
        return str(self.conditions(name).get(condition, {}).get("reason", ""))

    def await_condition(self, condition: str, reason: str, name: str = "demo") -> Object:
        """Waits until a condition has a reason; the condition."""
        self.eventually(lambda: self.reason(condition, name) == reason, lambda: self.conditions(name))
        return self.conditions(name)[condition]

    def eventually(self, true: Callable[[], Any], show: Callable[[], Any] = lambda: "") -> None:
        try:
            eventually(lambda: bool(true()), PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"never came true; last seen: {show()}") from None

    def make_token(self, account: str, name: str) -> str:
        """A token of a service account, valid until its Secret is deleted."""
        kind = "kubernetes.io/service-account-token"
        annotations = {"kubernetes.io/service-account.name": account}
        body = {"kind": "Secret", "metadata": {"name": name, "annotations": annotations}, "type": kind}
        self.call("POST", self.path("secrets"), body)
        self.eventually(lambda: "token" in (self.get("secrets", name) or {}).get("data", {}))
        secret = self.get("secrets", name)
        assert secret is not None
        return base64.b64decode(secret["data"]["token"]).decode()

    def make_ready(self, *deployments: str) -> None:
        """Does the work of kubelets: every pod of these Deployments runs and is ready."""
        for deployment in deployments:
            self.await_pods(deployment)
            for pod in self.pods(deployment):
                self.pod_status(pod, ready_status())

    def await_pods(self, deployment: str) -> None:
        """Waits until all pods of a Deployment have been made."""
        self.eventually(lambda: self._all_made(deployment), lambda: self.get("deployments", deployment))

    def _all_made(self, deployment: str) -> bool:
        found = self.get("deployments", deployment)
        return found is not None and len(self.pods(deployment)) == found["spec"]["replicas"]

    def pods(self, deployment: str) -> list[str]:
        found = self.get("deployments", deployment)
        assert found is not None
        labels = found["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = self.listed("pods", labelSelector=selector)
        return [one["metadata"]["name"] for one in pods if "deletionTimestamp" not in one["metadata"]]

    def pod_status(self, pod: str, status: Object) -> None:
        self.merge_status("pods", pod, status)


def ready_status() -> Object:
    """What a kubelet says of a pod that is ready."""
    kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
    return {"phase": "Running", "conditions": [{"type": kind, "status": "True"} for kind in kinds]}


@contextmanager
def volume(world: World, claim: str) -> Iterator[None]:
    """A volume for one claim, which the real controller binds; there is no node that would mount it."""
    name = f"{world.name}-{claim}"
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "hostPath": {"path": "/nowhere"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": world.name, "name": claim},
        },
    }
    world.call("POST", "/api/v1/persistentvolumes", body)
    try:
        yield
    finally:
        world.call("DELETE", f"/api/v1/persistentvolumes/{name}")


def _http(configuration: Configuration) -> httpx.Client:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    token = configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    headers = {"Authorization": token} if token else {}
    return httpx.Client(
        base_url=configuration.host, verify=context, headers=headers, timeout=60, trust_env=False
    )
