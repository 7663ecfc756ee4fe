"""Pods run on the node, from images built here."""

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.cluster.base import Cluster
from tests.cluster.fixtures import Namespace
from tests.cluster.images import build_image
from tests.integration.cluster.patience import until

HELLO = Path(__file__).parent / "hello"
IMAGE = "localhost/epd-test-hello:1"
PORT = 8000


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> str:
    """A small image, known to the node."""
    cluster.load_image(build_image(HELLO / "Dockerfile", IMAGE, context=HELLO))
    return IMAGE


def pod(
    name: str, image: str, command: list[str] | None = None, args: list[str] | None = None
) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        **({"command": command} if command else {}),
        **({"args": args} if args else {}),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]},
    }


def run_pod(namespace: Namespace, body: dict[str, Any]) -> str:
    """Runs a pod to its end; what it printed."""
    core = client.CoreV1Api(namespace.client)
    name = body["metadata"]["name"]
    core.create_namespaced_pod(namespace.name, body)

    def ended() -> Any:
        phase = core.read_namespaced_pod(name, namespace.name).status.phase
        return phase if phase in ("Succeeded", "Failed") else None

    phase = until(ended, f"the end of pod {name}")
    log = str(core.read_namespaced_pod_log(name, namespace.name))
    assert phase == "Succeeded", log
    return log


def test_a_built_image_runs_to_its_end(cluster_namespace: Namespace, image: str) -> None:
    assert "hello from one" in run_pod(cluster_namespace, pod("one", image))


def test_the_same_input_is_the_same_image(cluster: Cluster, image: str) -> None:
    archive = build_image(HELLO / "Dockerfile", IMAGE, context=HELLO)
    written = archive.stat().st_mtime_ns
    assert build_image(HELLO / "Dockerfile", IMAGE, context=HELLO) == archive
    assert archive.stat().st_mtime_ns == written
    cluster.load_image(archive)


def test_a_service_answers_here_and_in_pods(
    cluster: Cluster, cluster_namespace: Namespace, image: str
) -> None:
    core = client.CoreV1Api(cluster_namespace.client)
    name = cluster_namespace.name
    core.create_namespaced_pod(
        name, pod("web", image, args=None, command=["python", "-u", "/hello.py", str(PORT)])
    )
    ports = [{"port": 80, "targetPort": PORT}]
    body = {
        "metadata": {"name": "web"},
        "spec": {"type": "NodePort", "selector": {"app": "web"}, "ports": ports},
    }
    service = core.create_namespaced_service(name, body)
    address, port = service.spec.cluster_ip, service.spec.ports[0].node_port
    assert until(lambda: _get(f"http://{address}"), "the service answering") == "hello from web\n"
    assert until(lambda: _get(f"http://{cluster.node_ip}:{port}"), "the node's port answering")
    ask = (
        f"import urllib.request as u; print(u.urlopen('http://web.{name}.svc.cluster.local').read().decode())"
    )
    retry = f"for _ in range(100):\n try:\n  {ask}\n  break\n except OSError: __import__('time').sleep(0.2)"
    assert "hello from web" in run_pod(cluster_namespace, pod("asks", image, ["python", "-c", retry]))


def _get(url: str) -> str | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, TimeoutError):
        return None
