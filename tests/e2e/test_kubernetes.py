"""Helm install, kubectl apply, an answer: pods in containers on a real node share one volume."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import tools
from tests.cluster.base import Cluster
from tests.cluster.images import build_image
from tests.integration.chart.programs import CHART, Helm, Kubectl
from tests.support.digits import ROOT, shipped, user
from tests.support.engines import MODEL_NAME
from tests.support.waiting import eventually

PARTS = ("operator", "proxy", "engine")
START_SECONDS = 300.0  # images are there, but every engine imports torch on the same two cores
DOCUMENT = ROOT / "examples" / "digits.yaml"
SEVEN = [user(shipped("seven"), "What digit is this?")]
PAIR = [user(shipped("seven"), shipped("three"), "What digits are these?")]

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]


@dataclass
class Installation:
    """The operator in the cluster, and one EPDDeployment `digits` in a namespace of its own."""

    kubectl: Kubectl
    namespace: str
    url: str = ""

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", "-n", self.namespace, *arguments, "-o", "json"))

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.get("epddeployment", "digits").get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"status": "Unknown"})

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            resource = self.get("epddeployment", "digits")
            seen = resource.get("status", {}).get("observedGeneration")
            return seen == resource["metadata"]["generation"] and self.condition("Ready")["status"] == "True"

        try:
            eventually(is_ready, START_SECONDS)
        except AssertionError:
            raise AssertionError(self.explain()) from None

    def explain(self) -> str:
        """What a person would look at."""
        status = self.get("epddeployment", "digits").get("status", {})
        pods = self.kubectl("get", "pods", "-n", self.namespace, "-o", "wide")
        events = self.kubectl("get", "events", "-n", self.namespace, "--sort-by=.lastTimestamp")
        return f"not ready: {json.dumps(status, indent=1)}\n{pods}\n{events[-4000:]}"

    def encoders(self) -> list[str]:
        pods = self.get("pods", "-l", "app.kubernetes.io/component=encoder")["items"]
        return [p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]]

    def encoder_replicas(self) -> int:
        replicas: int = self.get("deployment", "digits-encoder")["spec"]["replicas"]
        return replicas

    def patch(self, spec: dict[str, Any]) -> None:
        body = json.dumps({"spec": spec})
        self.kubectl("patch", "epddeployment", "digits", "-n", self.namespace, "--type=merge", "-p", body)

    def ask(self, messages: list[dict[str, Any]]) -> httpx.Response:
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)

    def answer(self, messages: list[dict[str, Any]]) -> str:
        response = self.ask(messages)
        assert response.status_code == 200, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content


@pytest.fixture(scope="module")
def helm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tools.helm(4), tmp_path_factory.mktemp("helm"), cluster.kubeconfig)


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(tools.kubectl(), cluster.kubeconfig)


@pytest.fixture(scope="module")
def operator(cluster: Cluster, helm: Helm, kubectl: Kubectl) -> Iterator[None]:
    for part in PARTS:
        cluster.load_image(build_image(f"images/{part}/Dockerfile", f"localhost/epd-{part}:e2e", extra=part))
    values = ["--set", "image.registry=localhost,image.tag=e2e,image.pullPolicy=Never"]
    kubectl("create", "namespace", "epd-system")
    helm("install", "epd", str(CHART), "-n", "epd-system", *values)
    deployment = ["-n", "epd-system", "deployment", "-l", "app.kubernetes.io/instance=epd"]
    kubectl("wait", "--for=condition=Available", "--timeout=110s", *deployment)
    yield
    helm("uninstall", "epd", "-n", "epd-system")


@pytest.fixture(scope="module")
def installed(
    operator: None, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    namespace = "e2e"
    volume = tmp_path_factory.mktemp("volume")
    kubectl("create", "namespace", namespace)
    kubectl("apply", "-f", "-", given=json.dumps(local_volume(kubectl, volume)))
    made = Installation(kubectl, namespace)
    kubectl("apply", "-n", namespace, "-f", str(DOCUMENT))
    made.patch({"roles": {"encoder": {"replicas": 2}}})
    made.wait_ready()
    service = made.get("service", "digits-proxy")["spec"]
    made.url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
    eventually(lambda: answers(made.url), START_SECONDS)
    yield made
    kubectl("delete", "namespace", namespace)
    kubectl("delete", "persistentvolume", "e2e-store")


def answers(url: str) -> bool:
    """Service rules lag a pod's readiness by some seconds."""
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def local_volume(kubectl: Kubectl, path: Path) -> dict[str, Any]:
    """A volume on the node that many pods may write; of those kinds that heed fsGroup."""
    (node,) = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    hostname = node["metadata"]["labels"]["kubernetes.io/hostname"]
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [hostname]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "e2e-store"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def test_shipped_pictures_are_answered_right_through_the_proxys_service(installed: Installation) -> None:
    assert installed.answer(SEVEN) == "seven"
    assert installed.answer(PAIR) == "seven three"
    ready = httpx.get(f"{installed.url}/ready").json()["roles"]
    assert [len(ready["encoder"]), len(ready["pd"])] == [2, 1]


def test_kubectl_get_shows_what_runs(installed: Installation) -> None:
    table = installed.kubectl("get", "epd", "-n", installed.namespace, "-o", "wide")
    header, row = table.splitlines()
    assert {"READY", "MODEL", "ENCODER", "ENDPOINT"} <= set(header.split())
    assert "2/2" in row.split()
    assert "1/1" in row.split()
    assert "True" in row.split()


def test_pods_of_one_volume_are_restricted(installed: Installation) -> None:
    for pod in installed.get("pods")["items"]:
        security = pod["spec"]["containers"][0]["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert pod["status"]["phase"] == "Running"


def test_kubectl_scale_sticks_where_the_resource_leaves_replicas_out(installed: Installation) -> None:
    installed.patch({"roles": {"encoder": {"replicas": None}}})
    eventually(lambda: installed.condition("Ready")["status"] == "True", START_SECONDS)
    assert installed.encoder_replicas() == 2, "giving replicas up keeps the live value"
    installed.kubectl("scale", "-n", installed.namespace, "deployment/digits-encoder", "--replicas=3")
    eventually(lambda: len(installed.encoders()) == 3, START_SECONDS)
    installed.patch({"proxy": {"drainTimeout": "31s"}})
    installed.wait_ready()
    assert installed.encoder_replicas() == 3
    installed.kubectl("scale", "-n", installed.namespace, "deployment/digits-encoder", "--replicas=2")
    eventually(lambda: len(installed.encoders()) == 2, START_SECONDS)


@dataclass
class Traffic:
    """Pictures, one after another, until told to stop; no two alike, so that each one is encoded."""

    installation: Installation
    statuses: list[int] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        angle = 0.0
        while not self.stop.is_set():
            angle += 0.37
            picture = shipped("seven").rotate(angle)
            self.statuses.append(self.installation.ask([user(picture, "What digit is this?")]).status_code)


def test_an_encoder_pod_deleted_under_traffic_costs_no_request(installed: Installation) -> None:
    traffic = Traffic(installed)
    sender = threading.Thread(target=traffic.run)
    sender.start()
    try:
        eventually(lambda: len(traffic.statuses) > 5)
        victim = installed.encoders()[0]
        installed.kubectl("delete", "pod", "-n", installed.namespace, victim, "--wait=false")
        eventually(lambda: victim not in installed.encoders() and len(installed.encoders()) == 2)
        served = len(traffic.statuses)
        eventually(lambda: len(traffic.statuses) > served + 10, START_SECONDS)
    finally:
        traffic.stop.set()
        sender.join()
    assert set(traffic.statuses) == {200}


def test_deleting_the_resource_leaves_nothing(installed: Installation) -> None:
    installed.kubectl("delete", "epddeployment", "digits", "-n", installed.namespace)

    def gone() -> bool:
        kinds = "deployments,services,pods,persistentvolumeclaims,networkpolicies,poddisruptionbudgets"
        return not installed.get(f"{kinds},roles,rolebindings", "-l", "app.kubernetes.io/instance=digits")[
            "items"
        ]

    eventually(gone, START_SECONDS)
