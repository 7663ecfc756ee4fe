"""The harness' own parts that fail in ways worth knowing."""

import threading
import time
from pathlib import Path

import pytest

from tests.cluster.command import ClusterError
from tests.cluster.control_plane import until
from tests.cluster.dns import Records
from tests.cluster.paths import cached
from tests.cluster.processes import Processes, find


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_a_component_that_ends_shows_its_last_words(processes: Processes) -> None:
    processes.start("talker", ["sh", "-c", "echo last words; exit 3"])
    with pytest.raises(ClusterError, match=r"talker ended with status 3[^!]*last words"):
        until(processes, "talker", "ready", lambda: False)


def test_only_the_named_component_is_stopped(processes: Processes, tmp_path: Path) -> None:
    for name in ("one", "two"):
        processes.start(name, ["sleep", "1000"])
    processes.stop("one")
    assert not find(tmp_path, "one")
    assert find(tmp_path, "two")
    processes.kill_all()
    assert not find(tmp_path)


def test_a_component_that_will_not_end_is_killed(processes: Processes, tmp_path: Path) -> None:
    processes.start("stubborn", ["sh", "-c", "trap '' TERM; echo on; while :; do sleep 0.1; done"])
    while "on" not in processes.log("stubborn").read_text():
        time.sleep(0.01)
    processes.stop("stubborn", grace_s=0.2)
    assert not find(tmp_path)


def test_a_failed_build_is_not_cached(tmp_path: Path) -> None:
    def fail(out: Path, work: Path) -> None:
        (out / "half").touch()
        raise ClusterError("no")

    with pytest.raises(ClusterError):
        cached(tmp_path / "thing", fail)
    assert not (tmp_path / "thing").exists()
    done = cached(tmp_path / "thing", lambda out, work: (out / "whole").touch())
    assert [path.name for path in done.iterdir()] == ["whole"]


def test_two_builds_at_once_are_one(tmp_path: Path) -> None:
    builds = []

    def build(out: Path, work: Path) -> None:
        builds.append(out)
        time.sleep(0.2)

    threads = [threading.Thread(target=cached, args=(tmp_path / "thing", build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_records_follow_services_and_endpoints(tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.touch()
    records = Records(file, tmp_path / "no-pid", "cluster.local")
    records.replace(
        "endpoints", {("a", "many"): {"subsets": [{"addresses": [{"ip": "1.1.1.1"}, {"ip": "1.1.1.2"}]}]}}
    )
    records.replace("services", {("a", "one"): {"spec": {"clusterIP": "9.9.9.9"}}})
    records.change("services", ("a", "many"), {"spec": {"clusterIP": "None"}})
    expected = [
        "1.1.1.1 many.a.svc.cluster.local",
        "1.1.1.2 many.a.svc.cluster.local",
        "9.9.9.9 one.a.svc.cluster.local",
    ]
    assert file.read_text().splitlines() == expected
    records.change("services", ("a", "many"), None)
    assert file.read_text().splitlines() == expected[2:]
