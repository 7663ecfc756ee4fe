"""Manifests in the form in which the API server gives them back, so that equal things look equal."""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import RenderError
from .quantities import canonical_quantity, canonical_resources

# Fields that the API server leaves out at these values.
_LEFT_OUT: Mapping[str, Any] = {
    "hostNetwork": False,
    "hostPID": False,
    "hostIPC": False,
    "initialDelaySeconds": 0,
    "readOnly": False,
    "stdin": False,
    "stdinOnce": False,
    "tty": False,
    "value": "",
    "annotations": {},
    "args": [],
    "command": [],
    "env": [],
    "envFrom": [],
    "hostAliases": [],
    "imagePullSecrets": [],
    "initContainers": [],
    "labels": {},
    "limits": {},
    "nodeSelector": {},
    "ports": [],
    "requests": {},
    "tolerations": [],
    "topologySpreadConstraints": [],
    "volumeMounts": [],
    "volumes": [],
}


def canonical_pod_template(template: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A pod template with canonical quantities and nothing that the API server leaves out.

    `path` is where the user's part of it stands. Raises RenderError for what is no quantity.
    """
    result: dict[str, Any] = _pruned(template)
    spec = result["spec"]
    for field in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(field, []):
            resources = container.get("resources", {})
            for kind in ("requests", "limits"):
                where = f"{path}.spec.{field}[{container['name']}].resources"
                _replace(resources, kind, canonical_resources, where)
    for volume in spec.get("volumes", []):
        empty_dir = volume.get("emptyDir")
        if isinstance(empty_dir, dict):
            where = f"{path}.spec.volumes[{volume['name']}].emptyDir"
            _replace(empty_dir, "sizeLimit", canonical_quantity, where)
    _replace(spec, "overhead", canonical_resources, f"{path}.spec")
    return result


def by_field_name(value: Any) -> Any:
    """The same manifest with every mapping in order, so that equal manifests have equal bytes."""
    if isinstance(value, Mapping):
        return {field: by_field_name(value[field]) for field in sorted(value)}
    if isinstance(value, list | tuple):
        return [by_field_name(item) for item in value]
    return value


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = {field: _pruned(item) for field, item in value.items()}
        return {
            field: item
            for field, item in fields.items()
            if field not in _LEFT_OUT or item != _LEFT_OUT[field] or type(item) is not type(_LEFT_OUT[field])
        }
    if isinstance(value, list | tuple):
        return [_pruned(item) for item in value]
    return value


def _replace(fields: dict[str, Any], name: str, canonical: Callable[[Any], Any], path: str) -> None:
    if name not in fields:
        return
    try:
        fields[name] = canonical(fields[name])
    except (ValueError, AttributeError) as error:
        raise RenderError(f"{path}.{name}", f"holds what is no quantity: {error}") from None
