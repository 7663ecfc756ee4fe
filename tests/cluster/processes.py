"""Starting and ending the cluster's processes.

Every process carries the state directory of its cluster and the component's name in its environment. That,
and no list of process ids, tells which processes belong to a cluster: it also finds what a killed harness had
no time to write down, it cannot go stale, and nothing else on the machine can match it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from .command import POLL_S, ClusterError, Word, tail

STATE_MARK = "EPD_CLUSTER_STATE"
COMPONENT_MARK = "EPD_CLUSTER_COMPONENT"
GRACE_S = 15.0


def _environment(pid: int) -> Mapping[str, str]:
    """A process's environment; empty for one that is gone, a zombie, or another user's."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


def find(state: Path, component: str | None = None) -> list[int]:
    """The processes of a cluster, or of one of its components."""
    pids = []
    for pid in psutil.pids():
        marks = _environment(pid)
        if marks.get(STATE_MARK) == str(state) and component in (None, marks.get(COMPONENT_MARK)):
            pids.append(pid)
    return pids


def _dying(pid: int) -> bool:
    """A killed process has no environment any more, but may hold files and mounts for a moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def kill_all(state: Path) -> None:
    """Ends every process of a cluster at once."""
    deadline = time.monotonic() + GRACE_S
    killed: set[int] = set()
    while pids := find(state) or [pid for pid in killed if _dying(pid)]:
        _signal(pids, signal.SIGKILL)
        killed.update(pids)
        if time.monotonic() > deadline:
            raise ClusterError(f"{state}: these processes do not die: {pids}")
        time.sleep(POLL_S)


class Processes:
    """The components of one cluster, each with a log."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self.inside: tuple[str, ...] = ()
        """Put in front of every command: how to enter the cluster's namespaces, when it has any."""

    def log(self, component: str) -> Path:
        """Where a component's output goes."""
        return self._state / "log" / f"{component}.log"

    def start(self, component: str, command: Sequence[Word]) -> int:
        """Starts a component; it outlives this process."""
        log = self.log(component)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            self._own[component] = subprocess.Popen(
                [*self.inside, *(str(word) for word in command)],
                env={**os.environ, STATE_MARK: str(self._state), COMPONENT_MARK: component},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._state,
                start_new_session=True,
            )
        return self._own[component].pid

    def check(self) -> None:
        """Raises for a component of ours that has ended, with the end of its log."""
        for component, process in self._own.items():
            if process.poll() is not None:
                raise self.failure(component, f"ended with status {process.returncode}")

    def failure(self, component: str, what: str) -> ClusterError:
        """An error that shows the component's last words."""
        return ClusterError(f"{component} {what}; the end of its log:\n{tail(self.log(component))}")

    def stop(self, component: str, *, grace_s: float = GRACE_S) -> None:
        """Ends one component; by force when it takes too long, at once where there is no grace."""
        deadline = time.monotonic() + grace_s
        _signal(find(self._state, component), signal.SIGTERM if grace_s else signal.SIGKILL)
        while pids := find(self._state, component):
            if time.monotonic() > deadline:
                _signal(pids, signal.SIGKILL)
            time.sleep(POLL_S)
        self._reap(component)

    def kill_all(self) -> None:
        """Ends everything at once."""
        kill_all(self._state)
        for component in list(self._own):
            self._reap(component)

    def _reap(self, component: str) -> None:
        process = self._own.pop(component, None)
        if process is not None:
            process.wait()
