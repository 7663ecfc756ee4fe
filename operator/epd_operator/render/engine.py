"""The engines' pods and Deployments, and the account that they run under."""

import math
import posixpath
import re
from typing import Any

from ..api import EPDDeployment, Role, quantity_value
from ..api.deployment import MODELS_PATH, Model
from ..api.names import child_name
from ..roles import TRAITS, roles_of
from .affinity import beside_the_memory
from .context import Images
from .errors import RenderError
from .labels import child, labels
from .pods import HOME, PORT, PodParts, http_get, pod_template, startup_probe
from .store import Mount
from .transfers import transfer_flags, transfer_mounts
from .workloads import deployment_of, extended_resources

ACCOUNT = "engine"
CONTAINER = "engine"
HF_HOME = "/var/cache/huggingface"
_CUDA_DEVICES = re.compile(r"(nvidia\.com/(gpu|mig-).*|amd\.com/gpu)")


def engine_account(deployment: EPDDeployment) -> dict[str, Any]:
    """The engines' ServiceAccount: it may do nothing, and no token is mounted."""
    account = child(deployment, "v1", "ServiceAccount", ACCOUNT, ACCOUNT)
    return {**account, "automountServiceAccountToken": False}


def engine_deployments(deployment: EPDDeployment, images: Images) -> list[dict[str, Any]]:
    """One Deployment a role. Raises RenderError."""
    if deployment.spec.engine.type != "native":
        raise RenderError(
            "spec.engine.type",
            f"{deployment.spec.engine.type} cannot be run yet; remove it for the native engine",
        )
    return [
        deployment_of(deployment, name, role, _template(deployment, name, role, images))
        for name, role in roles_of(deployment)
    ]


def _template(deployment: EPDDeployment, name: str, role: Role, images: Images) -> dict[str, Any]:
    mounts = [_cache(deployment.spec.model), *transfer_mounts(deployment, TRAITS[name])]
    if deployment.spec.model.claim is not None:
        mounts.append(_model_claim(deployment.spec.model.claim))
    if role.shm_size is not None:
        mounts.append(_shared_memory(role.shm_size, role, f"spec.roles.{name}"))
    parts = PodParts(
        path=f"spec.roles.{name}",
        name=CONTAINER,
        image=deployment.spec.engine.image or images.engine,
        command=_command(deployment, name, role),
        service_account=child_name(deployment.metadata.name, ACCOUNT),
        labels=labels(deployment.metadata.name, name),
        probes={
            # /health answers while the model loads, so it would end the startup phase too soon for a budget.
            "startupProbe": startup_probe("/ready", role),
            "readinessProbe": http_get("/ready", period=5, failures=2, timeout=3),
            "livenessProbe": http_get("/health", period=10, failures=6, timeout=5),
        },
        env=_env(deployment.spec.model, role),
        volumes=[mount.volume for mount in mounts],
        mounts=[mount.mount for mount in mounts],
        affinity={} if TRAITS[name].ec_role is None else beside_the_memory(deployment),
    )
    return pod_template(parts, role, images)


def _command(deployment: EPDDeployment, name: str, role: Role) -> list[str]:
    model = deployment.spec.model
    command = ["epd-engine", "serve", _source(model), "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--served-model-name", model.name]
    command += ["--drain-timeout", str(role.drain_seconds)]
    if model.revision is not None:
        command += ["--revision", model.revision]
    if any(_CUDA_DEVICES.fullmatch(device) for device in _devices(role)):
        command += ["--device", "cuda"]
    return command + transfer_flags(deployment, TRAITS[name])


def _source(model: Model) -> str:
    """The model as the engine's argument. What is not in a claim is left to the image or the hub."""
    if model.claim is None:
        return model.source
    return posixpath.normpath(posixpath.join(MODELS_PATH, model.source))


def _env(model: Model, role: Role) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": "HF_HOME", "value": HF_HOME},
        {"name": "XDG_CACHE_HOME", "value": f"{HOME}/.cache"},
    ]
    if model.token_secret is not None:
        key = {"name": model.token_secret.name, "key": model.token_secret.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    amounts = role.resources.requests | role.resources.limits if role.resources is not None else {}
    if "cpu" in amounts:
        # Otherwise one thread is started for each core of the node, and they wait for one another.
        threads = max(1, math.ceil(quantity_value(amounts["cpu"])))
        env.append({"name": "OMP_NUM_THREADS", "value": str(threads)})
    return env


def _cache(model: Model) -> Mount:
    """Where downloads go: a claim that keeps them, or a folder that ends with the pod."""
    volume: dict[str, Any] = {"name": "cache", "emptyDir": {}}
    if model.cache_claim is not None:
        volume = {"name": "cache", "persistentVolumeClaim": {"claimName": model.cache_claim}}
    return Mount(volume, {"name": "cache", "mountPath": HF_HOME})


def _model_claim(claim: str) -> Mount:
    return Mount(
        {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": "model", "mountPath": MODELS_PATH, "readOnly": True},
    )


def _shared_memory(size: str, role: Role, path: str) -> Mount:
    """/dev/shm of a given size; what a runtime gives by itself is 64 MiB."""
    limit = role.resources.limits.get("memory") if role.resources is not None else None
    if limit is not None and quantity_value(size) >= quantity_value(limit):
        raise RenderError(f"{path}.shmSize", f"counts towards the memory limit ({limit}), so it must be less")
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    return Mount(volume, {"name": "shm", "mountPath": "/dev/shm"})


def _devices(role: Role) -> set[str]:
    """Devices of the engine's container, whichever of the two places names them."""
    containers = [] if role.resources is None else [{"resources": role.resources.model_dump()}]
    spec = role.pod_template.spec if role.pod_template is not None else None
    for container in (spec or {}).get("containers") or []:
        # What has another shape is refused where it is merged.
        if isinstance(container, dict) and container.get("name") == CONTAINER:
            containers.append({"resources": container.get("resources") or {}})
    return extended_resources(containers)
