"""This project's own engine in a pod."""

import re
from typing import Any

from ..api import EPDDeployment, Role
from ..roles import TRAITS
from .context import Images
from .model import source_of
from .pods import PORT, http_get, startup_probe
from .serving import EngineProcess, devices_of
from .transfers import transfer_flags

_CUDA_DEVICES = re.compile(r"(nvidia\.com/(gpu|mig-).*|amd\.com/gpu)")

_POD_IP: dict[str, Any] = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def native_process(deployment: EPDDeployment, name: str, role: Role, images: Images) -> EngineProcess:
    """The engine of one role. Raises RenderError."""
    return EngineProcess(
        image=deployment.spec.engine.image or images.engine,
        command=_command(deployment, name, role),
        env=[_POD_IP] if _has_peers(deployment, name) else [],
        probes={
            # /health answers while the model loads, so it would end the startup phase too soon for a budget.
            "startupProbe": startup_probe("/ready", role),
            "readinessProbe": http_get("/ready", period=5, failures=2, timeout=3),
            "livenessProbe": http_get("/health", period=10, failures=6, timeout=5),
        },
    )


def _command(deployment: EPDDeployment, name: str, role: Role) -> list[str]:
    model = deployment.spec.model
    command = ["epd-engine", "serve", source_of(model), "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--served-model-name", model.name]
    command += ["--drain-timeout", str(role.drain_seconds)]
    if model.revision is not None:
        command += ["--revision", model.revision]
    if any(_CUDA_DEVICES.fullmatch(device) for device in devices_of(role)):
        command += ["--device", "cuda"]
    # kubelet puts the address in.
    kv_ip = f"$({_POD_IP['name']})" if _has_peers(deployment, name) else None
    return command + transfer_flags(deployment, TRAITS[name], kv_ip)


def _has_peers(deployment: EPDDeployment, name: str) -> bool:
    """Whether other engines talk to this role."""
    return TRAITS[name].kv_role is not None and deployment.spec.kv_transfer_type == "nixl"
