"""The command `up`: checks a deployment against this machine and runs it."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ..api import EPDDeployment
from ..wire import StorePlaces
from .errors import LocalError
from .machine import Machine
from .memory import MemoryBudget, budget, make_memory
from .plan import make_plan, port_count
from .ports import check_port, free_ports
from .progress import progress_on
from .review import refusals
from .rundir import RunDirectory
from .state import DeploymentState
from .supervisor import StopRequest, Supervisor
from .vllm import VllmInstallation, find_python, make_connector


@dataclass(frozen=True)
class UpOptions:
    """What the command line adds to a document."""

    host: str
    port: int | None
    """0: find a free one; None: that of the document."""
    store: Path | None
    """A directory that is kept; None: one that is removed at the end."""
    vllm_python: Path | None = None
    """The interpreter of the environment that has vLLM; None: this one."""


def run(
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
    vllm = find_python(options.vllm_python) if deployment.spec.engine.type == "vllm" else None
    return asyncio.run(_run(deployment, name, model, vllm, options, ready))


async def _run(
    deployment: EPDDeployment,
    name: str,
    model: str,
    vllm: str | None,
    options: UpOptions,
    ready: Callable[[DeploymentState], None],
) -> int:
    stop = StopRequest()
    console = Console()
    with stop.on_signals(), RunDirectory(name) as directory:
        killed = directory.claim()
        if killed:
            console.print(f"an earlier run was killed; ended {killed} processes of it")
        places = _make_store(deployment, directory, options, console)
        machine = _machine(deployment, model, places, options)
        if vllm is not None:
            installation = VllmInstallation(vllm, make_connector(directory.connector))
            machine = replace(machine, vllm=installation)
        plan = make_plan(deployment, name, machine)
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


def _make_store(
    deployment: EPDDeployment, directory: RunDirectory, options: UpOptions, console: Console
) -> StorePlaces:
    """Makes the directories of the store's tiers. Raises LocalError where there is no place for one."""
    store = deployment.spec.ec_store
    storage, memory = None, None
    granted: MemoryBudget | None = None
    if store.shared_memory is not None:
        granted, memory = budget(store.shared_memory.capacity_bytes), str(directory.memory)
        if granted.note:
            console.print(f"note: {granted.note}", markup=False, highlight=False, soft_wrap=True)
        make_memory(directory.memory)
    if store.shared_storage is not None:
        path = (options.store or directory.store).resolve()
        path.mkdir(parents=True, exist_ok=True)
        storage = str(path)
    return StorePlaces(storage, memory, None if granted is None else granted.capacity)


def _machine(deployment: EPDDeployment, model: str, places: StorePlaces, options: UpOptions) -> Machine:
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
        places=places,
        host=options.host,
        proxy_port=port,
        ports=free_ports(port_count(deployment)),
    )


def _executable(name: str) -> str:
    """The command beside the running Python, else on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        extra = name.removeprefix("epd-")
        raise LocalError(f"{name} is not installed; `pip install 'epd[{extra}]'` brings it")
    return found
