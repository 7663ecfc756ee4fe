"""The store's janitor: one pod that keeps the store within its capacity, and knows how full it is."""

from typing import Any

from ..api import EPDDeployment, Workload
from ..api.names import child_name
from ..wire import janitor_command
from .affinity import JANITOR, beside_the_memory
from .context import Images
from .labels import labels
from .pods import PORT, PodParts, http_get, pod_template, startup_probe
from .serving import ACCOUNT
from .store import memory_mount, storage_mount, store_places
from .workloads import deployment_of

COMPONENT = CONTAINER = JANITOR
DEFAULT_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
"""For a store of a million entries, whose index takes 300 MB at most."""


def janitor_deployment(deployment: EPDDeployment, images: Images) -> dict[str, Any]:
    """The janitor's Deployment. Raises RenderError."""
    workload = _workload(deployment)
    mounts = [mount for mount in (storage_mount(deployment), memory_mount(deployment)) if mount is not None]
    parts = PodParts(
        path="spec.ecStore.janitor",
        name=CONTAINER,
        image=_image(deployment, images),
        command=_command(deployment),
        # The engines' account, which may do nothing.
        service_account=child_name(deployment.metadata.name, ACCOUNT),
        labels=labels(deployment.metadata.name, COMPONENT),
        probes={
            # /health answers while the entries of a large store are counted.
            "startupProbe": startup_probe("/ready", workload),
            "readinessProbe": http_get("/ready", period=5, failures=2, timeout=3),
            "livenessProbe": http_get("/health", period=10, failures=6, timeout=5),
        },
        volumes=[mount.volume for mount in mounts],
        mounts=[mount.mount for mount in mounts],
        affinity=beside_the_memory(deployment),
    )
    return deployment_of(deployment, COMPONENT, workload, pod_template(parts, workload, images))


def _image(deployment: EPDDeployment, images: Images) -> str:
    """The native engine's, which has the janitor in it, whichever engine the resource runs."""
    own = deployment.spec.engine.image if deployment.spec.engine.type == "native" else None
    return own or images.engine


def _command(deployment: EPDDeployment) -> list[str]:
    store = deployment.spec.ec_store
    return janitor_command("epd-engine", store, store_places(deployment), "0.0.0.0", PORT)


def _workload(deployment: EPDDeployment) -> Workload:
    """Exactly one, and none beside it while it is replaced: two would wait for one another's lease."""
    janitor = deployment.spec.ec_store.janitor.model_dump(by_alias=True)
    return Workload.model_validate(
        {
            **janitor,
            "resources": janitor["resources"] or DEFAULT_RESOURCES,
            "replicas": 1,
            "strategy": {"type": "Recreate"},
        }
    )
