"""The metrics APIs while something goes away: a replica, the API server, a certificate, the authority."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.base import Cluster
from tests.integration.chart.programs import Kubectl
from tests.integration.operator.world import World
from tests.integration.scaling.adapters import (
    NAME,
    NAMESPACE,
    QUICK,
    AdapterProcess,
    Installed,
    adapting,
    values,
)
from tests.integration.scaling.engines import engine, make_pod
from tests.support.waiting import eventually

QUEUED = "epd_engine_queued_media_tokens"
PATIENCE_S = 90.0


def seen(world: World) -> dict[str, str]:
    """What the API server answers; nothing while it cannot."""
    path = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}"
    try:
        return values(world.call("GET", path))
    except (httpx.HTTPStatusError, httpx.TransportError):
        return {}


def test_replicas_agree_and_one_is_enough(installed: Installed, world: World, tmp_path: Path) -> None:
    token = installed.kubectl("-n", NAMESPACE, "create", "token", NAME).strip()
    path = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}"
    installed.kubectl(
        "create", "clusterrolebinding", f"{world.name}-view", "--clusterrole=cluster-admin",
        f"--serviceaccount={NAMESPACE}:{NAME}",
    )  # fmt: skip

    def asked(adapter: AdapterProcess) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"https://127.0.0.1:{adapter.port}{path}", headers=headers, verify=False)
        return values(answer.json()) if answer.status_code == 200 else {}

    with (
        engine(**{QUEUED: 10.0}) as pod,
        adapting(installed, tmp_path) as first,
        adapting(installed, tmp_path) as second,
    ):
        installed.route_to(first, second)
        assert first.said("a new authority") + second.said("a new authority") <= 1
        make_pod(world, "a", "encoder", pod)
        eventually(lambda: asked(first) == asked(second) == {"a": "10"}, PATIENCE_S)
        pod.metrics[QUEUED] = 30.0
        eventually(lambda: asked(first) == asked(second) == {"a": "30"}, PATIENCE_S)
        first.kill()
        installed.route_to(second)
        eventually(lambda: seen(world) == {"a": "30"}, PATIENCE_S)
    installed.kubectl("delete", "clusterrolebinding", f"{world.name}-view")


def test_the_api_server_restarts(
    control_plane: Cluster, installed: Installed, world: World, tmp_path: Path
) -> None:
    with (
        engine(**{QUEUED: 5.0}) as one,
        engine(**{QUEUED: 6.0}) as late,
        adapting(installed, tmp_path) as adapter,
    ):
        make_pod(world, "a", "encoder", one)
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)
        control_plane.stop_apiserver(force=True)
        asked = one.asked
        eventually(lambda: one.asked > asked + 2, PATIENCE_S)
        assert adapter.health() == 200, "pods are known, and are asked directly"
        control_plane.start_apiserver()
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)
        # Its watch is a new one, too.
        make_pod(world, "b", "encoder", late)
        eventually(lambda: seen(world) == {"a": "5", "b": "6"}, PATIENCE_S)


@contextmanager
def asking(world: World) -> Iterator[list[bool]]:
    """Asks again and again while inside; whether each answer was right."""
    answers: list[bool] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.1):
            answers.append(seen(world) == {"a": "5"})

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def test_certificates_are_renewed_while_it_serves(installed: Installed, world: World, tmp_path: Path) -> None:
    short = (*QUICK, "--certificate-lifetime=12")
    with engine(**{QUEUED: 5.0}) as one, adapting(installed, tmp_path, *short) as adapter:
        make_pod(world, "a", "encoder", one)
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)
        with asking(world) as answers:
            made = adapter.said("a new serving certificate")
            began = time.monotonic()
            eventually(lambda: adapter.said("a new serving certificate") >= made + 2, PATIENCE_S)
            # The API server keeps connections open: only a new one sees the new certificate.
            installed.route_to(adapter)
            assert time.monotonic() - began > 6
        assert answers
        assert all(answers), f"{answers.count(False)} of {len(answers)} answers were wrong"
        assert adapter.said("a new authority") <= 1


def test_an_authority_that_was_deleted_or_damaged_is_made_anew(
    installed: Installed, kubectl: Kubectl, world: World, tmp_path: Path
) -> None:
    with engine(**{QUEUED: 5.0}) as one, adapting(installed, tmp_path) as adapter:
        make_pod(world, "a", "encoder", one)
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)
        before = kubectl.json("-n", NAMESPACE, "get", "secret", NAME)["data"]["ca.crt"]
        kubectl("-n", NAMESPACE, "delete", "secret", NAME)
        eventually(lambda: adapter.said("a new authority") >= 1, PATIENCE_S)
        made = kubectl.json("-n", NAMESPACE, "get", "secret", NAME)["data"]["ca.crt"]
        assert made != before
        service = kubectl.json("get", "apiservice", "v1beta1.custom.metrics.k8s.io")
        eventually(
            lambda: (
                kubectl.json("get", "apiservice", "v1beta1.custom.metrics.k8s.io")["spec"]["caBundle"] == made
            ),
            PATIENCE_S,
        )
        assert service["spec"]["service"]["name"] == NAME
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)
        again = adapter.said("a new authority")
        patch = json.dumps({"data": {"ca.key": "bm9uc2Vuc2U=", "ca.crt": "bm9uc2Vuc2U="}})
        kubectl("-n", NAMESPACE, "patch", "secret", NAME, "-p", patch)
        eventually(lambda: adapter.said("a new authority") > again, PATIENCE_S)
        eventually(lambda: seen(world) == {"a": "5"}, PATIENCE_S)


def test_an_adapter_that_cannot_be_reached_says_so_in_its_apiservice(
    installed: Installed, kubectl: Kubectl, world: World, tmp_path: Path
) -> None:
    """The API server's own check of it, which `kubectl get apiservice` shows, sees its death."""
    with adapting(installed, tmp_path) as adapter:
        adapter.kill()

    def available() -> str:
        status = kubectl.json("get", "apiservice", "v1beta1.custom.metrics.k8s.io")["status"]
        return next(c["status"] for c in status["conditions"] if c["type"] == "Available")

    eventually(lambda: available() == "False", PATIENCE_S)
    with pytest.raises(httpx.HTTPStatusError):
        world.call("GET", f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}")
