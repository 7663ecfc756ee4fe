"""What the pods of engines and of the proxy have in common: security, caches, probes, how they end."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api import Workload, duration_seconds
from .canonical import by_field_name, canonical_pod_template
from .context import Images
from .errors import RenderError
from .merge import merged

PORT = 8000
"""The port that containers listen on: above 1024, where no privilege is needed."""
PORT_NAME = "http"
USER_ID = 10001
"""User, group and fsGroup: numeric, so that the kubelet can check that it is not root."""

HOME = "/tmp"
"""Writable under a read-only root, and there without being made."""
PRE_STOP_SECONDS = 5
"""Between a pod's deletion and SIGTERM: time for proxies and Services to stop sending to it."""
GRACE_MARGIN_SECONDS = 10
"""Beyond draining, for a process to end by itself before it is killed."""
STARTUP_PERIOD_SECONDS = 2
"""A ready pod is noticed after half of this on average."""

Probe = dict[str, Any]


@dataclass(frozen=True)
class PodParts:
    """What differs between pods. Dictionaries are in the shape of the manifest."""

    path: str
    """Where the workload stands in the resource, for error messages."""
    name: str
    """The main container's name."""
    image: str
    command: Sequence[str]
    """The command line before `extraArgs`; its first word is the program."""
    service_account: str
    labels: Mapping[str, str]
    """Labels of the pod, which no pod template may change."""
    probes: Mapping[str, Probe]
    """`startupProbe`, `readinessProbe`, `livenessProbe`."""
    env: Sequence[dict[str, Any]] = ()
    volumes: Sequence[dict[str, Any]] = ()
    mounts: Sequence[dict[str, Any]] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    uses_api: bool = False
    """Whether the pod talks to the API server."""


def pod_template(parts: PodParts, workload: Workload, images: Images) -> dict[str, Any]:
    """The pod template of a workload, the user's part merged in. Raises RenderError."""
    ours: dict[str, Any] = {
        "metadata": {"labels": dict(parts.labels)},
        "spec": _spec(parts, workload, images),
    }
    if workload.pod_template is None:
        return canonical_pod_template(ours, parts.path)
    path = f"{parts.path}.podTemplate"
    theirs = workload.pod_template.model_dump(by_alias=True, exclude_none=True)
    # Nulls in the free part say what to remove, so they are kept.
    if workload.pod_template.spec is not None:
        theirs["spec"] = workload.pod_template.spec
    for label, value in theirs.get("metadata", {}).get("labels", {}).items():
        if parts.labels.get(label, value) != value:
            raise RenderError(
                f"{path}.metadata.labels[{label}]", "is the operator's own; choose another label"
            )
    return canonical_pod_template(merged(ours, theirs, path), path)


def template_hash(template: Mapping[str, Any]) -> str:
    """16 hex digits that change when a pod template does."""
    text = json.dumps(by_field_name(template), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def http_get(path: str, *, period: int, failures: int, timeout: int) -> Probe:
    """A probe by HTTP; times in seconds."""
    return {
        "httpGet": {"path": path, "port": PORT_NAME},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def startup_probe(path: str, workload: Workload) -> Probe:
    """A probe that gives up, and has the container started again, no sooner than after `startupTimeout`."""
    budget = duration_seconds(workload.startup_timeout)
    # The first probe comes at once, so n failures take n - 1 periods.
    failures = math.ceil(budget / STARTUP_PERIOD_SECONDS) + 1
    return http_get(path, period=STARTUP_PERIOD_SECONDS, failures=failures, timeout=2)


def grace_seconds(workload: Workload) -> int:
    """How long a pod may take to end: longer than its drain."""
    return PRE_STOP_SECONDS + workload.drain_seconds + GRACE_MARGIN_SECONDS


def progress_deadline_seconds(workload: Workload) -> int:
    """When a rollout counts as stuck: not before one old pod could end and a new one become ready."""
    return math.ceil(duration_seconds(workload.startup_timeout)) + grace_seconds(workload) + 60


def _spec(parts: PodParts, workload: Workload, images: Images) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "serviceAccountName": parts.service_account,
        "automountServiceAccountToken": parts.uses_api,
        # Variables of other Services would be taken for settings (vLLM reads VLLM_PORT).
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds(workload),
        "securityContext": _pod_security(),
        "imagePullSecrets": [{"name": name} for name in images.pull_secrets],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *parts.volumes],
        "containers": [_container(parts, workload, images)],
    }
    if parts.affinity:
        spec["affinity"] = dict(parts.affinity)
    return spec


def _container(parts: PodParts, workload: Workload, images: Images) -> dict[str, Any]:
    program, *args = parts.command
    container: dict[str, Any] = {
        "name": parts.name,
        "image": parts.image,
        "imagePullPolicy": images.pull_policy,
        "command": [program],
        "args": [*args, *workload.extra_args],
        "env": _env(parts.env, workload),
        # The protocol is a default, but server-side apply finds ports by it.
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "volumeMounts": [{"name": "tmp", "mountPath": HOME}, *parts.mounts],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_SECONDS)]}}},
        **parts.probes,
    }
    if workload.resources is not None:
        resources = workload.resources.model_dump(by_alias=True)
        container["resources"] = {kind: amounts for kind, amounts in resources.items() if amounts}
    return container


def _env(ours: Sequence[dict[str, Any]], workload: Workload) -> list[dict[str, Any]]:
    variables = {"HOME": {"name": "HOME", "value": HOME}}
    variables["PYTHONUNBUFFERED"] = {"name": "PYTHONUNBUFFERED", "value": "1"}
    variables |= {variable["name"]: variable for variable in ours}
    for variable in workload.env:
        variables[variable.name] = variable.model_dump(by_alias=True, exclude_none=True)
    return list(variables.values())


def _pod_security() -> dict[str, Any]:
    """What the restricted pod security standard wants of a pod; the group opens the store and the caches."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Changing the group of every entry of a large store would delay each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
