"""Helm install, kubectl apply, an answer: pods in containers on a real node share one volume."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest
import yaml

from tests.e2e.installation import START_SECONDS, Installation, installed_on, local_volume
from tests.integration.chart.programs import Kubectl
from tests.support.digits import ROOT, shipped, user
from tests.support.waiting import eventually

DOCUMENT = ROOT / "examples" / "digits.yaml"
SEVEN = [user(shipped("seven"), "What digit is this?")]
PAIR = [user(shipped("seven"), shipped("three"), "What digits are these?")]

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def installed(
    operator: None, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    document = yaml.safe_load(DOCUMENT.read_text())
    document["spec"]["roles"]["encoder"]["replicas"] = 2
    volume = local_volume(kubectl, "e2e-store", tmp_path_factory.mktemp("volume"), size="10Gi")
    with installed_on([volume], kubectl, "e2e", document) as made:
        yield made


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
    eventually(lambda: len(installed.pods("encoder")) == 3, START_SECONDS)
    installed.patch({"proxy": {"drainTimeout": "31s"}})
    installed.wait_ready()
    assert installed.encoder_replicas() == 3
    installed.kubectl("scale", "-n", installed.namespace, "deployment/digits-encoder", "--replicas=2")
    eventually(lambda: len(installed.pods("encoder")) == 2, START_SECONDS)


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
        victim = installed.pods("encoder")[0]
        installed.kubectl("delete", "pod", "-n", installed.namespace, victim, "--wait=false")
        eventually(lambda: victim not in installed.pods("encoder") and len(installed.pods("encoder")) == 2)
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
