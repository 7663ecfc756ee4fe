"""Pure: what an engine is started with on this machine."""

import os
from dataclasses import dataclass

from .. import vllm
from ..api import EPDDeployment, Role
from ..roles import TRAITS
from ..wire import transfer_flags
from .machine import LOOPBACK, Machine
from .vllm import VllmInstallation

UCX_DEVICES = "UCX_NET_DEVICES"
"""Where NIXL's transport looks for networks."""


@dataclass(frozen=True)
class EngineCommand:
    """One engine's command line before `extraArgs`, its environment, and where it says that it is ready."""

    argv: list[str]
    env: dict[str, str]
    ready_path: str


def native_engine(
    deployment: EPDDeployment, name: str, role: Role, machine: Machine, port: int
) -> EngineCommand:
    """This project's own engine."""
    argv = [machine.engine, "serve", machine.model, *_address(deployment, port)]
    argv += ["--drain-timeout", str(role.drain_seconds)]
    argv += transfer_flags(deployment.spec, TRAITS[name], machine.places)
    env = {}
    if _has_nixl(deployment, name) and UCX_DEVICES not in machine.environment:
        # NIXL would listen at every address of the machine, and end with a network that goes.
        env[UCX_DEVICES] = "lo"
    return EngineCommand(argv + _revision(deployment), env, "/ready")


def vllm_engine(
    deployment: EPDDeployment,
    name: str,
    role: Role,
    machine: Machine,
    installation: VllmInstallation,
    port: int,
    side_channel: int | None,
) -> EngineCommand:
    """vLLM with our connector; `side_channel` is its port for peers where it hands KV over or takes it."""
    argv = [installation.python, "-m", "vllm.entrypoints.cli.main", "serve", machine.model]
    argv += [*_address(deployment, port), *vllm.serve_arguments(TRAITS[name], role)]
    argv += transfer_flags(deployment.spec, TRAITS[name], machine.places)
    paths = [installation.connector, machine.environment.get("PYTHONPATH", "")]
    env = {**vllm.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if deployment.spec.model.is_path:
        env |= vllm.OFFLINE
    if side_channel is not None:
        env |= {vllm.SIDE_CHANNEL_HOST: LOOPBACK, vllm.SIDE_CHANNEL_PORT: str(side_channel)}
    # It listens once the model is loaded, and has no path of its own for being ready.
    return EngineCommand(argv + _revision(deployment), env, "/health")


def _has_nixl(deployment: EPDDeployment, name: str) -> bool:
    return TRAITS[name].kv_role is not None and deployment.spec.kv_transfer_type == "nixl"


def _address(deployment: EPDDeployment, port: int) -> list[str]:
    return ["--host", LOOPBACK, "--port", str(port), "--served-model-name", deployment.spec.model.name]


def _revision(deployment: EPDDeployment) -> list[str]:
    revision = deployment.spec.model.revision
    return [] if revision is None else ["--revision", revision]
