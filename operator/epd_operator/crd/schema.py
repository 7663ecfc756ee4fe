"""From pydantic's JSON schema to what Kubernetes calls a structural schema.

A structural schema has no references, says a type at every place, and knows neither null nor titles.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = frozenset(
    {
        "description", "type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum",
        "minItems", "maxItems", "minProperties", "maxProperties", "required",
    }
)  # fmt: skip

# What pydantic says and a structural schema must not: a field that is not listed is pruned or refused anyway,
# and the keys of a map cannot be described.
_DROPPED = frozenset({"title", "additionalProperties", "propertyNames", "default"})

_INT32_MAX = 2**31 - 1


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of a model.

    Raises ValueError where the model uses what such a schema cannot say.
    """
    schema = model.model_json_schema(by_alias=True)
    return _convert(schema, schema.get("$defs", {}), model.__name__)


def _convert(node: Mapping[str, Any], definitions: Mapping[str, Schema], path: str) -> Schema:
    node = _resolve(node, definitions, path)
    if node.get("x-kubernetes-int-or-string"):
        # The one place where a structural schema has two types. The mark says them by itself; an `anyOf`
        # beside it is allowed, but then errors come three at a time.
        left_out = {"title", "default", "anyOf"}
        return {key: value for key, value in node.items() if key not in left_out} | _default(node)
    result: Schema = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: _convert(one, definitions, f"{path}.{name}") for name, one in value.items()}
        elif key == "items":
            result[key] = _convert(value, definitions, f"{path}[]")
        elif key == "additionalProperties" and isinstance(value, dict):
            result[key] = _convert(value, definitions, f"{path}{{}}")
        elif key == "const":
            result["enum"] = [value]
        elif key == "description":
            result[key] = " ".join(value.split())
        elif key in _KEPT or key.startswith("x-kubernetes-"):
            result[key] = value
        elif key not in _DROPPED and key != "$defs":
            raise ValueError(f"{path}: a structural schema cannot say {key!r}")
    if "type" not in result:
        raise ValueError(f"{path}: a structural schema needs a type")
    return _annotated(result) | _default(node)


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Schema], path: str) -> Schema:
    """The node with its reference followed and null taken out; what stands beside a reference wins."""
    resolved = dict(node)
    while True:
        if "$ref" in resolved:
            target = definitions[resolved.pop("$ref").removeprefix("#/$defs/")]
            resolved = {**target, **resolved}
        elif "anyOf" in resolved and not resolved.get("x-kubernetes-int-or-string"):
            choices = [choice for choice in resolved.pop("anyOf") if choice != {"type": "null"}]
            if len(choices) != 1:
                raise ValueError(f"{path}: a structural schema cannot say {len(choices)} alternatives")
            resolved = {**choices[0], **resolved}
        else:
            return resolved


def _annotated(schema: Schema) -> Schema:
    """Width of numbers, and how lists are merged: as a whole, where nothing else is said."""
    if schema["type"] == "integer":
        return schema | {
            "format": "int32" if schema.get("maximum", _INT32_MAX + 1) <= _INT32_MAX else "int64"
        }
    if schema["type"] == "array":
        return {"x-kubernetes-list-type": "atomic"} | schema
    return schema


def _default(node: Mapping[str, Any]) -> Schema:
    """The default that the API server fills in.

    Only plain values, and objects made of such. Empty lists and maps would be noise in every object, and a
    default that picks a member of a union (as that of `ecStore`) would stay beside the member that a user
    adds later, and so make it two.
    """
    default = node.get("default")
    if isinstance(default, dict) and default and all(map(_is_plain, default.values())):
        # The fields in it have the same defaults of their own.
        return {"default": {}}
    if isinstance(default, list) and default and all(isinstance(entry, str) for entry in default):
        return {"default": default}
    if isinstance(default, bool | int | str) and default != "":
        return {"default": default}
    return {}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | str) or value in ([], {})
