"""An EPDDeployment on a real node, and what a person would look at."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.integration.chart.programs import Kubectl
from tests.support.engines import MODEL_NAME
from tests.support.waiting import eventually

START_SECONDS = 300.0  # images are there, but every engine imports torch on the same two cores


@dataclass
class Installation:
    """One EPDDeployment in a namespace of its own, of a cluster that has the operator."""

    kubectl: Kubectl
    namespace: str
    name: str
    url: str = ""

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", "-n", self.namespace, *arguments, "-o", "json"))

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.get("epddeployment", self.name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"status": "Unknown"})

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        def is_ready() -> bool:
            resource = self.get("epddeployment", self.name)
            seen = resource.get("status", {}).get("observedGeneration")
            return seen == resource["metadata"]["generation"] and self.condition("Ready")["status"] == "True"

        try:
            eventually(is_ready, seconds)
        except AssertionError:
            raise AssertionError(self.explain()) from None

    def explain(self) -> str:
        """What a person would look at."""
        status = self.get("epddeployment", self.name).get("status", {})
        pods = self.kubectl("get", "pods", "-n", self.namespace, "-o", "wide")
        events = self.kubectl("get", "events", "-n", self.namespace, "--sort-by=.lastTimestamp")
        return f"not ready: {json.dumps(status, indent=1)}\n{pods}\n{events[-4000:]}"

    def pods(self, role: str) -> list[str]:
        """Names of the role's pods that are not about to end."""
        pods = self.get("pods", "-l", f"app.kubernetes.io/component={role}")["items"]
        return [p["metadata"]["name"] for p in pods if "deletionTimestamp" not in p["metadata"]]

    def metric(self, role: str, sample: str) -> float:
        """A sample of the role's one pod, with its labels; 0 where it has none yet."""
        (pod,) = self.pods(role)
        return self.metric_of(pod, sample)

    def metric_of(self, pod: str, sample: str) -> float:
        """The same of any pod."""
        program = (
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        )
        command = ["exec", pod, "-n", self.namespace, "--", "python3", "-c", program]
        for line in self.kubectl(*command).splitlines():
            if line.startswith(f"{sample} "):
                return float(line.split()[-1])
        return 0.0

    def encoder_replicas(self) -> int:
        replicas: int = self.get("deployment", f"{self.name}-encoder")["spec"]["replicas"]
        return replicas

    def patch(self, spec: dict[str, Any]) -> None:
        body = json.dumps({"spec": spec})
        self.kubectl("patch", "epddeployment", self.name, "-n", self.namespace, "--type=merge", "-p", body)

    def find_endpoint(self) -> None:
        """The proxy's address, once something answers there: service rules lag a pod's readiness."""
        service = self.get("service", f"{self.name}-proxy")["spec"]
        self.url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
        eventually(lambda: _answers(self.url), START_SECONDS)

    def ask(self, messages: list[dict[str, Any]]) -> httpx.Response:
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)

    def answer(self, messages: list[dict[str, Any]]) -> str:
        response = self.ask(messages)
        assert response.status_code == 200, response.text
        content: str = response.json()["choices"][0]["message"]["content"]
        return content


@contextmanager
def installed_on(
    volumes: Sequence[dict[str, Any]],
    kubectl: Kubectl,
    namespace: str,
    *documents: dict[str, Any],
    seconds: float = START_SECONDS,
) -> Iterator[Installation]:
    """The last of `documents` is an EPDDeployment; once it is ready, in a namespace of its own. All of it
    goes, the volumes too, however far it came."""
    names = [volume["metadata"]["name"] for volume in volumes]
    kubectl("create", "namespace", namespace)
    try:
        for volume in volumes:
            kubectl.apply(volume)
        for document in documents:
            kubectl.apply(document, "-n", namespace)
        made = Installation(kubectl, namespace, documents[-1]["metadata"]["name"])
        made.wait_ready(seconds)
        made.find_endpoint()
        yield made
    finally:
        kubectl("delete", "namespace", namespace)
        kubectl("delete", "persistentvolume", *names, "--ignore-not-found")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def local_volume(
    kubectl: Kubectl, name: str, path: Path, *, size: str, storage_class: str | None = None
) -> dict[str, Any]:
    """A volume on the node that many pods may write; of those kinds that heed fsGroup."""
    (node,) = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    hostname = node["metadata"]["labels"]["kubernetes.io/hostname"]
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [hostname]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
            **({} if storage_class is None else {"storageClassName": storage_class}),
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }
