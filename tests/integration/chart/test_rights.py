"""The real operator, run with exactly the rights that the chart gives its ServiceAccount."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.chart.programs import CHART, CRD, Helm, Kubectl, wait_until_established
from tests.integration.cluster.patience import until
from tests.unit.operator.crd.documents import with_fields

OPERATOR = "epd-epd-operator"
CHILDREN = {
    "deployment.apps/digits-encoder",
    "deployment.apps/digits-pd",
    "deployment.apps/digits-proxy",
    "service/digits-proxy",
    "rolebinding.rbac.authorization.k8s.io/digits-proxy",
}
SCALER = "horizontalpodautoscaler.autoscaling/digits-pd"
_CPU = {
    "type": "Resource",
    "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}},
}


@pytest.fixture(scope="module", params=["cluster", "namespace"])
def release(request: pytest.FixtureRequest, helm: Helm, kubectl: Kubectl) -> Iterator[str]:
    """The namespace of a release of one scope, in which resources live too."""
    if helm("version", "--short").startswith("v3"):
        pytest.skip("the roles are the same with either Helm")
    name = f"rights-{uuid.uuid4().hex[:8]}"
    kubectl("delete", CRD, "--ignore-not-found")
    helm(
        "install", "epd", str(CHART), "-n", name, "--create-namespace", "--set", f"scope={request.param}",
        "--set", "replicas=0",
    )  # fmt: skip
    wait_until_established(kubectl)
    yield name
    helm("uninstall", "epd", "-n", name)
    kubectl("delete", CRD)
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def kubeconfig(kubectl: Kubectl, release: str, tmp_path: Path) -> Path:
    """Access as the operator's ServiceAccount and nobody else."""
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    token = kubectl("-n", release, "create", "token", OPERATOR).strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def test_it_makes_and_removes_every_child(
    kubectl: Kubectl, release: str, kubeconfig: Path, tmp_path: Path
) -> None:
    deployment = kubectl.json("-n", release, "get", "deployment", OPERATOR)
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    ports = ["--metrics-port=0", "--health-port=0"]
    log = tmp_path / "operator.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from epd_operator.main import main; main()", *arguments, *ports],
            env=os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": release},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        scaled = {"maxReplicas": 2, "metrics": [_CPU], "provider": "resource"}
        kubectl.apply(with_fields({"roles.pd.autoscaling": scaled}), "-n", release)

        def children() -> set[str]:
            assert process.poll() is None, log.read_text()[-4000:]
            kinds = "deployment,service,rolebinding,horizontalpodautoscaler,persistentvolumeclaim"
            return set(kubectl("-n", release, "get", kinds, "-o", "name").split())

        until(lambda: children() >= CHILDREN | {SCALER}, "all children")
        until(lambda: kubectl.json("-n", release, "get", "epd", "digits").get("status"), "a status")
        kubectl.apply(with_fields({}), "-n", release)
        until(lambda: SCALER not in children(), "the end of the autoscaler")
        kubectl("-n", release, "delete", "epd", "digits")
        # Owner references and Kubernetes' own collector do it.
        until(lambda: not children() & CHILDREN, "the end of the children")
    finally:
        process.terminate()
        process.wait(timeout=30)
    said = log.read_text()
    assert "orbidden" not in said, said[-4000:]
