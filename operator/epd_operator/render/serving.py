"""What differs between the engines' pods, and what both look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Role
from .pods import Probe
from .workloads import extended_resources

ACCOUNT = "engine"
CONTAINER = "engine"


@dataclass(frozen=True)
class EngineProcess:
    """One engine's container, of one role."""

    image: str
    command: Sequence[str]
    """Before `extraArgs`; its first word is the program."""
    env: Sequence[dict[str, Any]]
    """Beside what every engine gets."""
    probes: Mapping[str, Probe]
    uses_shm: bool = False
    """Whether it needs more of /dev/shm than the 64 MiB that a runtime gives by itself."""


def devices_of(role: Role) -> set[str]:
    """Devices of the engine's container, whichever of the two places names them."""
    containers = [] if role.resources is None else [{"resources": role.resources.model_dump()}]
    spec = role.pod_template.spec if role.pod_template is not None else None
    for container in (spec or {}).get("containers") or []:
        # What has another shape is refused where it is merged.
        if isinstance(container, dict) and container.get("name") == CONTAINER:
            containers.append({"resources": container.get("resources") or {}})
    return extended_resources(containers)
