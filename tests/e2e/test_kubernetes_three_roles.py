"""Encoder, prefill and decode as pods: the shipped example, whose KV crosses as files on one volume."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.installation import Installation, installed_on, local_volume
from tests.integration.chart.programs import Kubectl
from tests.support.digits import ROOT, shipped, user
from tests.support.waiting import eventually

DOCUMENT = ROOT / "examples" / "digits-epd.yaml"

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def installed(operator: None, kubectl: Kubectl, volume: Path) -> Iterator[Installation]:
    document = yaml.safe_load(DOCUMENT.read_text())
    volumes = [local_volume(kubectl, "e2e-three", volume, size="10Gi")]
    with installed_on(volumes, kubectl, "e2e-three", document) as made:
        yield made


def test_pictures_are_answered_right_by_three_roles(installed: Installation, volume: Path) -> None:
    """And decode computes none of the prompt; what carried it is gone afterwards."""
    assert installed.answer([user(shipped("seven"), "What digit is this?")]) == "seven"
    pair = [user(shipped("seven"), shipped("three"), "What digits are these?")]
    assert installed.answer(pair) == "seven three"
    ready = httpx.get(f"{installed.url}/ready").json()["roles"]
    assert [len(ready[role]) for role in ("encoder", "prefill", "decode")] == [1, 1, 1]
    assert installed.metric("decode", "epd_engine_kv_loads_total") == 2
    assert installed.metric("decode", "epd_engine_prompt_tokens_total") == 0
    assert installed.metric("prefill", "epd_engine_kv_saves_total") == 2
    eventually(lambda: not [*volume.glob("kv/*/*")])


def test_the_status_tells_prefill_and_decode_apart(installed: Installation) -> None:
    roles = installed.get("epddeployment", installed.name)["status"]["roles"]
    assert roles["language"] == "P 1/1 D 1/1"
    for role in ("PrefillReady", "DecodeReady"):
        assert installed.condition(role)["status"] == "True"


def test_a_decode_pod_that_is_gone_is_replaced(installed: Installation) -> None:
    (victim,) = installed.pods("decode")
    installed.kubectl("delete", "pod", "-n", installed.namespace, victim, "--wait=false")
    eventually(lambda: victim not in installed.pods("decode"))
    installed.wait_ready()
    question = [user(shipped("three"), "What digit is this?")]
    eventually(lambda: installed.ask(question).status_code == 200, 60)
    assert installed.answer(question) == "three"
