"""Two tiers on a real node: pods of different users meet in one tmpfs, through a claim."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.installation import Installation, installed_on, local_volume
from tests.integration.chart.programs import Kubectl
from tests.support.digits import ROOT, shipped, user
from tests.support.waiting import eventually

DOCUMENT = ROOT / "examples" / "memory.yaml"
USERS = {"encoder": 20001, "pd": 20002}

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory of the machine's own tmpfs: a mount made now would not be seen by the node."""
    path = Path("/dev/shm") / f"epd-e2e-{secrets.token_hex(4)}"
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def installed(
    operator: None, kubectl: Kubectl, memory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    volumes = [
        local_volume(kubectl, "e2e-memory", memory, size="256Mi", storage_class="epd-memory"),
        local_volume(kubectl, "e2e-files", tmp_path_factory.mktemp("files"), size="1Gi"),
    ]
    document = yaml.safe_load(DOCUMENT.read_text())
    for role, uid in USERS.items():
        document["spec"]["roles"][role]["podTemplate"] = {"spec": {"securityContext": {"runAsUser": uid}}}
    with installed_on(volumes, kubectl, "e2e-memory", document) as made:
        yield made


def test_pods_of_different_users_exchange_an_entry_through_memory(
    installed: Installation, memory: Path
) -> None:
    assert installed.answer([user(shipped("seven"), "What digit is this?")]) == "seven"
    loaded = 'epd_engine_ec_load_bytes_total{tier="memory"}'
    assert installed.metric("pd", loaded) > 0
    (arena,) = memory.rglob("*.arena")
    (lease,) = [path for path in memory.rglob(".leases/*") if path.stat().st_uid == USERS["pd"]]
    assert arena.stat().st_uid == USERS["encoder"]
    assert arena.stat().st_gid == lease.stat().st_gid


def test_the_status_says_how_full_the_store_is(installed: Installation) -> None:
    eventually(lambda: store_of(installed).get("entries", 0) >= 1)
    assert store_of(installed)["capacityBytes"] > 0


def store_of(installed: Installation) -> dict[str, Any]:
    store: dict[str, Any] = installed.get("epddeployment", installed.name)["status"].get("store", {})
    return store


def test_what_memory_has_lost_comes_from_the_files(installed: Installation, memory: Path) -> None:
    for arena in memory.rglob("*.arena"):
        arena.unlink()
    (pod,) = installed.pods("pd")
    installed.kubectl("delete", "pod", "-n", installed.namespace, pod)
    eventually(lambda: installed.pods("pd") not in ([], [pod]))
    installed.wait_ready()
    eventually(lambda: installed.ask([user(shipped("seven"), "What digit is this?")]).status_code == 200)
    assert installed.metric("pd", 'epd_engine_ec_load_bytes_total{tier="storage"}') > 0
