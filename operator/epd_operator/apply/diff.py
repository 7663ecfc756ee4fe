"""Pure: whether an object is as we want it, in the fields that are ours.

The API server remembers who set each field (`metadata.managedFields`). An object needs no write when we own
exactly the fields that we want, and they have the values that we want. What others added, and what the API
server filled in, is not looked at.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..api import quantity_value

MANAGER = "epd-operator"
"""The field manager of everything that the operator writes."""
REPLICAS_MANAGER = "epd-operator-replicas"
"""The field manager that keeps a number of replicas which the resource no longer sets."""

Fields = Mapping[str, Any]
"""A set of fields as `fieldsV1` has it; an empty one stands for a whole value."""

# The object's identity is never among the fields that somebody owns.
_IDENTITY = frozenset({"apiVersion", "kind"})
_IDENTITY_METADATA = frozenset({"name", "namespace"})
_AMOUNTS = frozenset({"limits", "requests", "capacity"})
_AMOUNT = frozenset({"sizeLimit", "divisor", "averageValue"})


def owned_fields(live: Mapping[str, Any], manager: str = MANAGER) -> Fields:
    """The fields of an object that a manager applied; empty where there are none."""
    for entry in live["metadata"].get("managedFields", ()):
        whole = "subresource" not in entry or entry["subresource"] == ""
        if entry["manager"] == manager and entry["operation"] == "Apply" and whole:
            fields: Fields = entry.get("fieldsV1", {})
            return fields
    return {}


def owns(fields: Fields, *path: str) -> bool:
    """Whether a field is in a set of fields."""
    for name in path:
        if f"f:{name}" not in fields:
            return False
        fields = fields[f"f:{name}"]
    return True


def as_wanted(desired: Mapping[str, Any], live: Mapping[str, Any], fields: Fields) -> bool:
    """Whether applying `desired` would change nothing of `live`, of which `fields` are ours."""
    if not fields:
        return False
    wanted = {name: value for name, value in desired.items() if name not in _IDENTITY}
    metadata = wanted.pop("metadata").items()
    described = {name: value for name, value in metadata if name not in _IDENTITY_METADATA}
    if described:
        wanted["metadata"] = described
    return _same(wanted, live, fields, "")


def _same(desired: Any, live: Any, fields: Fields, name: str) -> bool:
    names = {key for key in fields if key != "."}
    if not names:
        return _covers(desired, live, name)
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and _same_fields(desired, live, fields, names, name)
    if isinstance(desired, list):
        return isinstance(live, list) and _same_items(desired, live, fields, names, name)
    return False


def _same_fields(
    desired: Mapping[str, Any], live: Mapping[str, Any], fields: Fields, names: set[str], name: str
) -> bool:
    wanted = {f"f:{key}": key for key in desired}
    # API servers before 1.22 do not write down who set an empty map (`emptyDir: {}`).
    if not names <= set(wanted) or any(desired[wanted[field]] for field in set(wanted) - names):
        return False
    return all(
        key in live and _same(value, live[key], fields.get(f"f:{key}", {}), _next(name, key))
        for key, value in desired.items()
    )


def _same_items(desired: list[Any], live: list[Any], fields: Fields, names: set[str], name: str) -> bool:
    """Of a list whose items have an identity: a key (`k:`), or for a set their value (`v:`)."""
    if len(names) != len(desired):
        return False
    for key in names:
        kind, _, text = key.partition(":")
        identity = json.loads(text)
        if kind == "v":
            if identity not in desired or identity not in live:
                return False
            continue
        ours = next((item for item in desired if _has(item, identity)), None)
        theirs = next((item for item in live if _has(item, identity)), None)
        if ours is None or theirs is None or not _same(ours, theirs, fields[key], name):
            return False
    return True


def _has(item: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    # A part of a key that we leave out (a port's protocol) is filled in by the API server.
    return all(item.get(field, value) == value for field, value in identity.items())


def _covers(desired: Any, live: Any, name: str) -> bool:
    """Whether a value is what we want, but for what the API server filled in."""
    if isinstance(desired, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and _covers(value, live[key], _next(name, key)) for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(desired) == len(live)
            and all(_covers(ours, theirs, name) for ours, theirs in zip(desired, live, strict=True))
        )
    return desired == live or (name in _AMOUNT and _same_amount(desired, live))


def _next(name: str, key: str) -> str:
    """The name by which a field within `name` is known: amounts of resources are named by their map."""
    return "sizeLimit" if name in _AMOUNTS else key


def _same_amount(one: Any, other: Any) -> bool:
    try:
        return quantity_value(str(one)) == quantity_value(str(other))
    except ValueError:
        return False
