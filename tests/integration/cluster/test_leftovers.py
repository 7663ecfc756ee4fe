"""Nothing of a cluster stays behind: not after its end, and not after its harness was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.cluster import local
from tests.cluster.addresses import Network
from tests.cluster.build import binaries
from tests.cluster.command import Unavailable
from tests.cluster.network_namespaces import INIT
from tests.cluster.paths import REPOSITORY
from tests.cluster.processes import find
from tests.cluster.slots import CGROUPS, Slot, state_directory

HOLDER = Path(__file__).with_name("hold_cluster.py")
PATIENCE_S = 120.0


@pytest.fixture(params=["control-plane", "node"])
def kind(request: pytest.FixtureRequest) -> str:
    """With and without a node."""
    local.check_possible(with_node=request.param == "node")
    binaries()
    return str(request.param)


@contextmanager
def held(kind: str, log: Path) -> Iterator["Held"]:
    """A cluster in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, HOLDER, kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            assert process.stdout is not None
            cluster = Held(process, process.stdout, log)
            try:
                yield cluster
            finally:
                cluster.kill()
                cluster.clean()


class Held:
    """What it took of the machine is known by its slot."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str], log: Path) -> None:
        self._process = process
        self._output = output
        self._log = log
        self.slot: int = self._line()["slot"]
        self.state = state_directory(self.slot)

    def wait_ready(self) -> None:
        """Until it is up."""
        assert self._line()["ready"]

    def kill(self) -> None:
        """Without a chance to clean."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def clean(self) -> None:
        """Also when a test fails half-way."""
        if slot := Slot.take(self.slot):
            slot.clean()
            slot.release()

    def end(self) -> None:
        """As a harness should."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()

    def remains(self) -> list[str]:
        """Everything of it that is there."""
        interface = Network(self.slot).interface
        found = [f"process {pid}" for pid in find(self.state)]
        found += [
            f"mount {line}" for line in Path("/proc/self/mounts").read_text().splitlines() if self._ours(line)
        ]
        found += [f"interface {name}" for name in psutil.net_if_addrs() if name == interface]
        found += [f"cgroup {path}" for path in CGROUPS.glob(f"*/epd-cluster-{self.slot}")]
        return found + ([f"state {self.state}"] if self.state.exists() else [])

    def _ours(self, mount: str) -> bool:
        return f" {self.state}/" in mount

    def _line(self) -> dict[str, int]:
        line = self._output.readline()
        assert line, f"it ended:\n{self._log.read_text()}"
        parsed: dict[str, int] = json.loads(line)
        return parsed


def pids(*names: str) -> set[int]:
    """The processes of this machine, or those of some names."""
    processes = psutil.process_iter(["name"])
    return {process.pid for process in processes if not names or process.info["name"] in names}


def test_a_killed_run_is_cleaned_by_the_next_which_leaves_nothing(kind: str, tmp_path: Path) -> None:
    with held(kind, tmp_path / "log") as killed:
        killed.wait_ready()
        killed.kill()
        processes = find(killed.state)
        assert processes, "a killed harness was expected to leave its cluster behind"
        with held(kind, tmp_path / "log") as following:
            following.wait_ready()
            assert not set(processes) & pids()
            assert_left_alone_while_in_use(following)
            during = pids("etcd", "kubelet", "containerd")
            following.end()
            assert following.remains() == []
            assert not during <= pids("etcd", "kubelet", "containerd")
        assert killed.remains() == []


def assert_left_alone_while_in_use(cluster: Held) -> None:
    """Taking a slot cleans what others left, so it must know what is not left but used."""
    before = cluster.remains()
    assert len(before) > 4
    assert Slot.take(cluster.slot) is None
    free = Slot.take_free()
    free.release()
    assert free.number != cluster.slot
    assert cluster.remains() == before


def test_a_run_killed_while_starting_is_cleaned(tmp_path: Path) -> None:
    local.check_possible(with_node=True)
    binaries()
    with held("node", tmp_path / "log") as killed:
        deadline = time.monotonic() + PATIENCE_S
        while not find(killed.state, INIT):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.kill()
        assert killed.remains()
        killed.clean()
        assert killed.remains() == []


def test_what_cannot_be_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(Unavailable, match="root"):
        local.check_possible(with_node=True)
