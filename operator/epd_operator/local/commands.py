"""The commands on local deployments: up, ps, logs, down."""

import asyncio
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..api import EPDDeployment
from .errors import LocalError
from .logs import follow, tail
from .plan import Machine, engine_count, make_plan
from .ports import check_port, free_ports
from .progress import progress_on
from .review import notes, refusals
from .rundir import AlreadyRunning, RunDirectory, known_runs
from .state import DeploymentState, Phase, read_state
from .supervisor import StopRequest, Supervisor

SUPERVISOR = "supervisor"
"""Name of the log of `epd up` itself, where it runs in the background."""

_PAUSE_S = 0.05


@dataclass(frozen=True)
class UpOptions:
    """What the command line adds to a document."""

    host: str
    port: int | None
    """0: find a free one; None: that of the document."""
    store: Path | None
    """A directory that is kept; None: one that is removed at the end."""


def up(
    deployment: EPDDeployment,
    name: str,
    base: Path,
    options: UpOptions,
    ready: Callable[[DeploymentState], None],
) -> int:
    """Runs a deployment until it is told to stop; the exit status. Relative paths start at `base`.

    Raises LocalError when it cannot run here, and when a process does not start.
    """
    model = _check(deployment, base, options)
    return asyncio.run(_up(deployment, name, model, options, ready))


async def _up(
    deployment: EPDDeployment,
    name: str,
    model: str,
    options: UpOptions,
    ready: Callable[[DeploymentState], None],
) -> int:
    stop = StopRequest()
    console = Console()
    with stop.on_signals(), RunDirectory(name) as directory:
        killed = directory.claim()
        if killed:
            console.print(f"an earlier run was killed; ended {killed} processes of it")
        plan = make_plan(deployment, name, _machine(deployment, model, directory, options))
        plan.store.mkdir(parents=True, exist_ok=True)
        for note in notes(deployment):
            console.print(f"note: {note}", markup=False, highlight=False)
        progress = progress_on(console)

        def all_ready(state: DeploymentState) -> None:
            progress.close()
            ready(state)

        try:
            was_ready = await Supervisor(plan, directory, progress, all_ready).run(stop)
        finally:
            progress.close()
    console.print(f"{name} is stopped" if was_ready else f"{name} was stopped before it was ready")
    return 0 if was_ready else 1


def ps(name: str | None = None) -> list[DeploymentState]:
    """What runs, and what a killed `epd up` left."""
    states = []
    for known in known_runs() if name is None else [name]:
        directory = RunDirectory(known)
        state = read_state(directory.state)
        if state is None:  # just beginning, or just over
            continue
        if not directory.is_held():
            state.phase = Phase.DEAD
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
    return f"{name} had been killed; ended {killed} processes that it left, and removed its files"


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


def _check(deployment: EPDDeployment, base: Path, options: UpOptions) -> str:
    """The model's absolute path or hub id. Raises LocalError with all reasons why it cannot run here."""
    reasons = refusals(deployment, own_store=options.store is not None)
    model = deployment.spec.model
    path = (base / model.source).resolve()
    if model.is_path and not path.is_dir():
        reasons.append(f"spec.model.source: there is no directory {path}")
    if not model.is_path and path.is_dir():
        reasons.append(
            f"spec.model.source: is read as a hub id, but is a directory too; write ./{model.source} for that"
        )
    if reasons:
        raise LocalError(
            "this deployment cannot run here:\n" + "\n".join(f"  {reason}" for reason in reasons)
        )
    return str(path) if model.is_path else model.source


def _machine(deployment: EPDDeployment, model: str, directory: RunDirectory, options: UpOptions) -> Machine:
    port = deployment.spec.proxy.port if options.port is None else options.port
    if port:
        check_port(options.host, port)
    else:
        port = free_ports(1, options.host)[0]
    return Machine(
        engine=_executable("epd-engine"),
        proxy=_executable("epd-proxy"),
        cores=len(os.sched_getaffinity(0)),
        environment=os.environ,
        model=model,
        store=(options.store or directory.store).resolve(),
        host=options.host,
        proxy_port=port,
        engine_ports=free_ports(engine_count(deployment)),
    )


def _executable(name: str) -> str:
    """The command beside the running Python, else on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        extra = name.removeprefix("epd-")
        raise LocalError(f"{name} is not installed; `pip install 'epd[{extra}]'` brings it")
    return found


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
