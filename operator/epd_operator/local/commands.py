"""The commands on deployments that run: ps, logs, down."""

import os
import select
import signal
import time
from collections.abc import Iterator

from .errors import LocalError
from .logs import follow, tail
from .rundir import AlreadyRunning, RunDirectory, known_runs
from .state import DeploymentState, Phase, read_state

SUPERVISOR = "supervisor"
"""Name of the log of `epd up` itself, where it runs in the background."""

_PAUSE_S = 0.05


def ps(name: str | None = None) -> list[DeploymentState]:
    """What runs, and what a killed `epd up` left."""
    states = []
    for known in known_runs() if name is None else {name}.intersection(known_runs()):
        directory = RunDirectory(known)
        state = read_state(directory.state)
        if state is None:  # just beginning, or just over
            continue
        if not directory.is_held():
            state.phase = Phase.DEAD
            for process in state.processes:
                process.phase, process.pid, process.note = Phase.DEAD, None, ""
        states.append(state)
    return states


def only_name(name: str | None) -> str:
    """The deployment that is meant: the one named, or else the only one there is.

    Raises LocalError when that is none, or cannot be told.
    """
    runs = known_runs()
    if name is not None and name not in runs:
        raise LocalError(f"{name} is not running; `epd ps` lists what is")
    if name is not None:
        return name
    if not runs:
        raise LocalError("nothing is running; start a deployment with `epd up -d -f FILE`")
    if len(runs) > 1:
        raise LocalError(f"several deployments are running; name one of {', '.join(runs)} with --name")
    return runs[0]


def down(name: str) -> str:
    """Stops a deployment and waits until it is gone; says in a sentence what was done."""
    directory = RunDirectory(name)
    while directory.is_held():
        state = read_state(directory.state)
        if state is None or not _end(state.supervisor, directory):
            time.sleep(_PAUSE_S)
    if not directory.path.exists():
        return f"{name} is stopped"
    try:
        with directory:
            killed = directory.claim()
    except AlreadyRunning:
        raise LocalError(f"{name} was started again meanwhile") from None
    left = f"{killed} processes and its files" if killed else "its files"
    return f"{name} had been killed; removed what it left: {left}"


def logs(name: str, role: str | None, lines: int | None, keep_on: bool) -> Iterator[str]:
    """Lines of the logs of a role or process, or of all; then those to come, until the deployment ends.

    Raises LocalError when there is no such role.
    """
    directory = RunDirectory(name)
    state = read_state(directory.state)
    processes = state.processes if state is not None else []
    paths = [directory.logs / f"{one.name}.log" for one in processes if role in (None, one.role, one.name)]
    if role in (None, SUPERVISOR):
        paths.append(directory.logs / f"{SUPERVISOR}.log")
    if not paths:
        known = sorted({one.role for one in processes} | {one.name for one in processes} | {SUPERVISOR})
        raise LocalError(f"{name} has no {role!r}; it has {', '.join(known)}")
    following = follow(paths, lambda: not directory.is_held()) if keep_on else iter(())
    for path in paths:
        yield from tail(path, lines)
    yield from following


def _end(pid: int, directory: RunDirectory) -> bool:
    """Asks a supervisor to stop and waits until it has; False if it was gone already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not directory.is_held():  # the id may be somebody else's by now
            return False
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        select.select([handle], [], [])
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
