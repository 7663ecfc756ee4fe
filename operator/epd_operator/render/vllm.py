"""vLLM in a pod, with this project's EC connector in its image."""

from typing import Any

from .. import vllm
from ..api import EPDDeployment, Role
from ..roles import TRAITS
from .context import Images
from .errors import RenderError
from .model import source_of
from .pods import HOME, PORT, http_get, startup_probe
from .serving import EngineProcess
from .transfers import transfer_flags

_CACHES = {
    "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm",
    "VLLM_CONFIG_ROOT": f"{HOME}/.config/vllm",
    "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
    "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
    # The pods' user has no entry in the image's passwd, and torch looks for its name.
    "USER": "epd",
}
"""What vLLM and torch write beside the model, under a root that is read-only."""


def vllm_process(deployment: EPDDeployment, name: str, role: Role, images: Images) -> EngineProcess:
    """vLLM of one role. Raises RenderError."""
    image = deployment.spec.engine.image or images.vllm
    if image is None:
        raise RenderError(
            "spec.engine.image",
            "there is no image of vLLM: build one from images/engine-vllm and name it here, or for all "
            "resources in the chart's `image.vllm`",
        )
    return EngineProcess(
        image=image,
        command=_command(deployment, name, role),
        env=_env(deployment, name),
        # It listens once the model is loaded, and has no other path.
        probes={
            "startupProbe": startup_probe("/health", role),
            "readinessProbe": http_get("/health", period=5, failures=2, timeout=3),
            "livenessProbe": http_get("/health", period=10, failures=6, timeout=5),
        },
        # Its processes talk to one another through it, and NCCL does.
        uses_shm=True,
    )


def _command(deployment: EPDDeployment, name: str, role: Role) -> list[str]:
    model = deployment.spec.model
    command = ["vllm", "serve", source_of(model), "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--served-model-name", model.name]
    if model.revision is not None:
        command += ["--revision", model.revision]
    command += vllm.serve_arguments(TRAITS[name], role)
    return command + transfer_flags(deployment, TRAITS[name])


def _env(deployment: EPDDeployment, name: str) -> list[dict[str, Any]]:
    values = {**_CACHES, **vllm.ENVIRONMENT, **(vllm.OFFLINE if deployment.spec.model.is_path else {})}
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in values.items()]
    if TRAITS[name].kv_role is not None:
        pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
        env.append({"name": vllm.SIDE_CHANNEL_HOST, "valueFrom": pod_ip})
        env.append({"name": vllm.SIDE_CHANNEL_PORT, "value": str(vllm.DEFAULT_SIDE_CHANNEL_PORT)})
    return env
