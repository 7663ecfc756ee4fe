"""Merging a user's piece of a manifest into ours: by name where a list's items have one, the user wins.

Rules, for each field:

- a mapping is merged field by field, and null removes the field;
- of alternatives (a probe's `httpGet` and `exec`, a variable's `value` and `valueFrom`) the user's
  alone stays;
- a list whose items have a key is merged item by item, new items going to the end. Volumes of one name are
  replaced whole, since two sources cannot be mixed;
- tolerations and `envFrom` are appended to;
- any other value, lists included, is replaced.
"""

from collections.abc import Mapping
from typing import Any

from .errors import RenderError

_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
}
_KEY_DEFAULTS: Mapping[str, str] = {"protocol": "TCP"}
_REPLACED_WHOLE = frozenset({"volumes"})
_APPENDED = frozenset({"tolerations", "envFrom", "readinessGates"})
_ALTERNATIVES = (
    frozenset({"exec", "httpGet", "tcpSocket", "grpc", "sleep"}),
    frozenset({"value", "valueFrom"}),
)


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`ours` with `theirs` merged into it; neither is changed.

    `path` is where `theirs` stands in the resource. Raises RenderError for a shape that cannot be merged.
    """
    result = dict(ours)
    for one_of in _ALTERNATIVES:
        given = one_of & {field for field, value in theirs.items() if value is not None}
        for field in one_of - given if given else ():
            result.pop(field, None)
    for field, value in theirs.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _merged_field(field, result.get(field), value, f"{path}.{field}")
    return result


def _merged_field(field: str, ours: Any, theirs: Any, path: str) -> Any:
    if field in _KEYS:
        return _merged_items(field, ours or [], _list(theirs, path), path)
    if field in _APPENDED:
        return [*(ours or []), *(item for item in _list(theirs, path) if item not in (ours or []))]
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return merged(ours, theirs, path)
    if isinstance(ours, Mapping):
        raise RenderError(path, "must be a mapping of fields")
    return _without_nulls(theirs)


def _merged_items(field: str, ours: list[Any], theirs: list[Any], path: str) -> list[Any]:
    items = {_key(field, item, path): item for item in ours}
    seen = set()
    for index, item in enumerate(theirs):
        place = f"{path}[{index}]"
        key = _key(field, item, place)
        if key in seen:
            raise RenderError(place, f"is a second entry for {', '.join(map(str, key))}")
        seen.add(key)
        if key in items and field not in _REPLACED_WHOLE:
            items[key] = merged(items[key], item, place)
        else:
            items[key] = merged({}, item, place)
    return list(items.values())


def _key(field: str, item: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(item, Mapping):
        raise RenderError(path, "must be a mapping of fields")
    key = tuple(item.get(part, _KEY_DEFAULTS.get(part)) for part in _KEYS[field])
    for part, value in zip(_KEYS[field], key, strict=True):
        if not isinstance(value, str | int):
            raise RenderError(path, f"needs `{part}`, by which it is merged")
    return key


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise RenderError(path, "must be a list")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {field: _without_nulls(item) for field, item in value.items() if item is not None}
    return value
