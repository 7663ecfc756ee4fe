"""The control plane without a node does what a real one does."""

import json
from typing import Any

import pytest
from kubernetes import client

from tests.cluster import providers
from tests.cluster.api import Api
from tests.cluster.base import Cluster
from tests.cluster.command import Unavailable
from tests.cluster.fixtures import Namespace
from tests.integration.cluster.patience import until


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


def deployment(name: str, replicas: int) -> dict[str, Any]:
    labels = {"app": name}
    container = {"name": "main", "image": "localhost/none:1"}
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def test_an_object_comes_back_as_written(namespace: Namespace) -> None:
    core = client.CoreV1Api(namespace.client)
    core.create_namespaced_config_map(namespace.name, config_map("settings", color="green"))
    assert core.read_namespaced_config_map("settings", namespace.name).data == {"color": "green"}


def test_controllers_make_pods_of_a_deployment(namespace: Namespace) -> None:
    apps, core = client.AppsV1Api(namespace.client), client.CoreV1Api(namespace.client)
    apps.create_namespaced_deployment(namespace.name, deployment("web", replicas=3))
    pods = until(
        lambda: (found := core.list_namespaced_pod(namespace.name).items) and len(found) == 3 and found,
        "three pods",
    )
    (replica_set,) = apps.list_namespaced_replica_set(namespace.name).items
    assert {pod.metadata.owner_references[0].name for pod in pods} == {replica_set.metadata.name}
    assert {pod.status.phase for pod in pods} == {"Pending"}


def test_the_scheduler_says_why_a_pod_waits(namespace: Namespace) -> None:
    core = client.CoreV1Api(namespace.client)
    container = {"name": "main", "image": "localhost/none:1"}
    core.create_namespaced_pod(
        namespace.name, {"metadata": {"name": "one"}, "spec": {"containers": [container]}}
    )
    conditions = until(
        lambda: core.read_namespaced_pod("one", namespace.name).status.conditions, "a condition"
    )
    assert conditions[0].reason == "Unschedulable"


@pytest.mark.parametrize("force", [False, True], ids=["asked", "killed"])
def test_a_restarted_api_server_has_the_data_and_its_controllers(
    control_plane: Cluster, namespace: Namespace, force: bool
) -> None:
    core = client.CoreV1Api(namespace.client)
    before = core.create_namespaced_config_map(namespace.name, config_map("kept", a="1"))
    control_plane.stop_apiserver(force=force)
    with pytest.raises(OSError, match="refused"):
        _connect(control_plane)
    control_plane.start_apiserver()
    after = core.read_namespaced_config_map("kept", namespace.name)
    assert after.metadata.uid == before.metadata.uid
    client.AppsV1Api(namespace.client).create_namespaced_deployment(namespace.name, deployment("web", 1))
    until(lambda: core.list_namespaced_pod(namespace.name).items, "a pod of a deployment")


def _connect(cluster: Cluster) -> None:
    Api(cluster.kubeconfig).text("/readyz")


def test_the_audit_log_counts_requests(control_plane: Cluster, namespace: Namespace) -> None:
    log = control_plane.enable_audit()
    try:
        core = client.CoreV1Api(namespace.client)
        for number in range(3):
            core.create_namespaced_config_map(namespace.name, config_map(f"number-{number}"))
        events = [json.loads(line) for line in log.read_text().splitlines()]
        ours = [e for e in events if e.get("objectRef", {}).get("name", "").startswith("number-")]
        assert [event["verb"] for event in ours] == ["create"] * 3
        assert {event["user"]["username"] for event in ours} == {"admin"}
    finally:
        control_plane.restart_apiserver([])


def test_logs_are_at_hand(control_plane: Cluster) -> None:
    assert control_plane.logs("kube-apiserver", lines=5).count("\n") == 4


def test_what_a_control_plane_lacks_is_said(control_plane: Cluster) -> None:
    with pytest.raises(Unavailable, match="node"):
        _ = control_plane.node_ip


def test_a_named_cluster_is_used_and_left(control_plane: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(providers.KUBECONFIG_VARIABLE, str(control_plane.kubeconfig))
    with providers.start(with_node=True) as named:
        assert named.kubeconfig == control_plane.kubeconfig
        with pytest.raises(Unavailable):
            named.restart_apiserver()
    _connect(control_plane)
