"""Each role follows its own traffic: real autoscalers ask our metrics adapter about real pods, under load."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.installation import START_SECONDS, Installation, installed_on, local_volume
from tests.e2e.traffic import ask_about_pictures, ask_for_tokens, traffic
from tests.integration.chart.programs import Kubectl
from tests.support.digits import ROOT
from tests.support.waiting import eventually

DOCUMENT = ROOT / "examples" / "digits.yaml"
CLIENTS = 16  # of a load; beside it there are always two, one of each kind
# The signal that a role is scaled by, and the mean per replica that is held.
TARGETS = {
    "encoder": ("epd_engine_queued_media_tokens", "36"),  # four pictures
    "pd": ("epd_engine_requests_in_progress", "10"),
}
WORK = {"encoder": "epd_engine_encoder_items_total", "pd": "epd_engine_generated_tokens_total"}

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]


def scaled(role: str) -> dict[str, Any]:
    """One replica or two."""
    name, mean = TARGETS[role]
    held = {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": mean}}
    return {
        "resources": {"requests": {"cpu": "100m"}},
        "autoscaling": {
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "Pods", "pods": held}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
        },
    }


@pytest.fixture(scope="module")
def installed(
    operator: None, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    document = yaml.safe_load(DOCUMENT.read_text())
    document["spec"]["roles"] = {role: scaled(role) for role in TARGETS}
    # However busy the engines are, who answers for them is heard.
    document["spec"]["proxy"] = {"resources": {"requests": {"cpu": "400m"}}}
    volume = local_volume(kubectl, "e2e-scaling", tmp_path_factory.mktemp("volume"), size="10Gi")
    with installed_on([volume], kubectl, "e2e-scaling", document) as made:
        yield made


@contextmanager
def watched(installed: Installation, role: str, folder: Path) -> Iterator[Callable[[], list[int]]]:
    """All numbers of replicas that anybody has wanted since, in order."""
    kubectl, log = installed.kubectl, folder / f"{role}.log"
    command = ["get", "deployment", f"{installed.name}-{role}", "-n", installed.namespace, "--watch"]
    wanted = "--output=jsonpath={.spec.replicas}{'\\n'}"
    environment = os.environ | {"KUBECONFIG": str(kubectl.kubeconfig)}
    with log.open("wb") as out:
        process = subprocess.Popen([str(kubectl.program), *command, wanted], stdout=out, env=environment)

    def seen() -> list[int]:
        return [int(number) for number, _ in groupby(log.read_text().split())]

    try:
        eventually(lambda: bool(seen()))
        yield seen
        assert process.poll() is None, "somebody watched to the end"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def proxy(installed: Installation) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=installed.url, timeout=START_SECONDS, trust_env=False) as client:
        yield client


def has_two_at_work(installed: Installation, proxy: httpx.Client, role: str) -> bool:
    """Whether the proxy knows of two, and each has done something."""
    known = proxy.get("/ready").json()["roles"][role]
    if [one["ready"] for one in known] != [True, True]:
        return False
    return all(installed.metric_of(pod, WORK[role]) > 0 for pod in installed.pods(role))


def pods_of(installed: Installation, role: str) -> int:
    """How many there are, with those that are about to end."""
    return len(installed.get("pods", "-l", f"app.kubernetes.io/component={role}")["items"])


def await_or_explain(installed: Installation, condition: Callable[[], bool]) -> None:
    try:
        eventually(condition, START_SECONDS)
    except AssertionError:
        scalers = installed.kubectl("describe", "hpa", "-n", installed.namespace)
        raise AssertionError(f"{installed.explain()}\n{scalers}") from None


@pytest.mark.parametrize(
    ("role", "other", "ask", "how"),
    [
        pytest.param("encoder", "pd", ask_about_pictures, {"pictures": 8}, id="pictures"),
        pytest.param("pd", "encoder", ask_for_tokens, {"tokens": 200}, id="long answers"),
    ],
)
def test_traffic_scales_its_own_role_up_and_down_and_no_request_fails(
    installed: Installation,
    proxy: httpx.Client,
    tmp_path: Path,
    role: str,
    other: str,
    ask: Callable[..., None],
    how: dict[str, int],
) -> None:
    with (
        watched(installed, role, tmp_path) as replicas,
        watched(installed, other, tmp_path) as others,
        traffic(installed.url, ask_about_pictures, clients=1, pictures=1) as pictures,
        traffic(installed.url, ask_for_tokens, clients=1, tokens=50) as answers,
    ):
        with traffic(installed.url, ask, clients=CLIENTS, **how) as load:
            await_or_explain(installed, lambda: has_two_at_work(installed, proxy, role))
        # One of two is drained while both kinds of requests go on.
        await_or_explain(installed, lambda: pods_of(installed, role) == 1)
        assert replicas() == [1, 2, 1]
        assert others() == [1]
    for one in (load, pictures, answers):
        assert one.failures == []
        assert one.answered > 0
