"""What is running, as `epd up` writes it down and `epd ps` reads it."""

import json
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Phase(StrEnum):
    """Where a process or a deployment stands."""

    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not ready"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DEAD = "dead"
    """`epd up` was killed, and its processes with it: `epd down` cleans up."""


@dataclass
class ProcessState:
    """One process. `note` says why it is in its phase, where that needs saying."""

    name: str
    role: str
    port: int
    phase: Phase = Phase.STARTING
    pid: int | None = None
    restarts: int = 0
    note: str = ""


@dataclass
class DeploymentState:
    """One deployment. `address` is the root that `/v1/...` follows."""

    name: str
    model: str
    address: str
    supervisor: int
    directory: str
    store: str | None
    """Directory of the store's files; None where they are in memory alone."""
    phase: Phase = Phase.STARTING
    processes: list[ProcessState] = field(default_factory=list)
    memory: str | None = None
    """Directory of what the store keeps in memory."""

    def as_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        return asdict(self)


def write_state(path: Path, state: DeploymentState) -> None:
    """Replaces the file at once, so that a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(state.as_json(), indent=2))
    os.replace(temporary, path)


def read_state(path: Path) -> DeploymentState | None:
    """The state in a file, or None where there is none (yet, or any more)."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    processes = [ProcessState(**{**one, "phase": Phase(one["phase"])}) for one in values.pop("processes")]
    return DeploymentState(**{**values, "phase": Phase(values["phase"])}, processes=processes)
