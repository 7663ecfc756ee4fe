"""The engines' pods and Deployments, and the account that they run under."""

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

from ..api import EPDDeployment, Role, quantity_value
from ..api.names import child_name
from ..roles import TRAITS, roles_of
from .affinity import beside_the_memory
from .context import Images
from .errors import RenderError
from .labels import child, labels
from .model import model_env, model_mounts
from .native import native_process
from .pods import PodParts, pod_template
from .serving import ACCOUNT, CONTAINER, EngineProcess
from .store import Mount
from .transfers import transfer_mounts
from .vllm import vllm_process
from .workloads import deployment_of

_PROCESSES: dict[str, Callable[[EPDDeployment, str, Role, Images], EngineProcess]] = {
    "native": native_process,
    "vllm": vllm_process,
}


ENGINE_HASH_ANNOTATION = "epd.dev/engine-hash"
"""Changes with the engine's image and the model: with what decides which entries and KV a role knows."""


def engine_account(deployment: EPDDeployment) -> dict[str, Any]:
    """The engines' ServiceAccount: it may do nothing, and no token is mounted."""
    account = child(deployment, "v1", "ServiceAccount", ACCOUNT, ACCOUNT)
    return {**account, "automountServiceAccountToken": False}


def engine_deployments(deployment: EPDDeployment, images: Images) -> list[dict[str, Any]]:
    """One Deployment a role. Raises RenderError."""
    return [_deployment(deployment, name, role, images) for name, role in roles_of(deployment)]


def _deployment(deployment: EPDDeployment, name: str, role: Role, images: Images) -> dict[str, Any]:
    process = _PROCESSES[deployment.spec.engine.type](deployment, name, role, images)
    manifest = deployment_of(deployment, name, role, _template(deployment, name, role, process, images))
    manifest["metadata"]["annotations"][ENGINE_HASH_ANNOTATION] = _engine_hash(deployment, manifest)
    return manifest


def _engine_hash(deployment: EPDDeployment, manifest: dict[str, Any]) -> str:
    model, containers = deployment.spec.model, manifest["spec"]["template"]["spec"]["containers"]
    # A pod template may name another image.
    (image,) = (one["image"] for one in containers if one["name"] == CONTAINER)
    parts = [image, deployment.spec.engine.type, model.source, model.revision, model.claim]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _template(
    deployment: EPDDeployment, name: str, role: Role, process: EngineProcess, images: Images
) -> dict[str, Any]:
    path = f"spec.roles.{name}"
    cache, *claim = model_mounts(deployment.spec.model)
    mounts = [cache, *transfer_mounts(deployment, TRAITS[name]), *claim]
    if role.shm_size is not None or process.uses_shm:
        mounts.append(_shared_memory(role, path))
    parts = PodParts(
        path=path,
        name=CONTAINER,
        image=process.image,
        command=process.command,
        service_account=child_name(deployment.metadata.name, ACCOUNT),
        labels=labels(deployment.metadata.name, name),
        probes=process.probes,
        env=[*_env(deployment, role), *process.env],
        volumes=[mount.volume for mount in mounts],
        mounts=[mount.mount for mount in mounts],
        affinity={} if TRAITS[name].ec_role is None else beside_the_memory(deployment),
    )
    return pod_template(parts, role, images)


def _env(deployment: EPDDeployment, role: Role) -> list[dict[str, Any]]:
    env = model_env(deployment.spec.model)
    amounts = role.resources.requests | role.resources.limits if role.resources is not None else {}
    if "cpu" in amounts:
        # Otherwise one thread is started for each core of the node, and they wait for one another.
        threads = max(1, math.ceil(quantity_value(amounts["cpu"])))
        env.append({"name": "OMP_NUM_THREADS", "value": str(threads)})
    return env


def _shared_memory(role: Role, path: str) -> Mount:
    """/dev/shm, of a given size or of what the memory limit leaves; a runtime gives 64 MiB by itself."""
    limit = role.resources.limits.get("memory") if role.resources is not None else None
    memory = {"medium": "Memory"}
    if role.shm_size is not None:
        if limit is not None and quantity_value(role.shm_size) >= quantity_value(limit):
            words = f"counts towards the memory limit ({limit}), so it must be less"
            raise RenderError(f"{path}.shmSize", words)
        memory["sizeLimit"] = role.shm_size
    return Mount({"name": "shm", "emptyDir": memory}, {"name": "shm", "mountPath": "/dev/shm"})
