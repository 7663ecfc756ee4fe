"""What connectors for encoder caches and for KV share: configs as JSON, classes by name."""

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

Base = TypeVar("Base")


class TransferConfigError(ValueError):
    """A transfer config that cannot be used; the message names the field."""


def parse_config(
    text: str, config: type[Any], kind: str, roles: Sequence[str], error: type[TransferConfigError]
) -> dict[str, Any]:
    """The fields of a flag's JSON value for the dataclass `config`, whose own begin with `kind` ("ec", "kv").

    Raises `error`, naming the field at fault.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as problem:
        raise error(f"not JSON: {problem}") from problem
    if not isinstance(document, dict):
        raise error("must be a JSON object")
    known = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(set(document) - set(known)):
        raise error(f"unknown field {unknown[0]!r}; known are {', '.join(known)}")
    for name in (f"{kind}_connector", f"{kind}_role"):
        if not isinstance(document.get(name), str):
            raise error(f"{name!r} is needed and must be a string")
    if document[f"{kind}_role"] not in roles:
        raise error(f"{kind}_role must be one of {', '.join(roles)}")
    for name in ("engine_id", f"{kind}_ip", f"{kind}_connector_module_path"):
        if not isinstance(document.get(name), str | None):
            raise error(f"{name} must be a string")
    if not isinstance(document.get(f"{kind}_connector_extra_config", {}), dict):
        raise error(f"{kind}_connector_extra_config must be a JSON object")
    return document


def read_extra(
    connector: str,
    kind: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    error: type[TransferConfigError],
) -> dict[str, Any]:
    """A connector's extra config over `defaults`; a default's type is the key's type, None takes any.

    Raises `error` for a key that is not in `defaults` or a value of another type.
    """
    field = f"{kind}_connector_extra_config"
    if unknown := sorted(set(given) - set(defaults)):
        raise error(f"{connector} does not know {field} key {unknown[0]!r}; known are {', '.join(defaults)}")
    for key, value in given.items():
        wanted = type(defaults[key])
        if defaults[key] is None or type(value) is wanted or (wanted is float and type(value) is int):
            continue
        raise error(f"{field} key {key!r} must be a {wanted.__name__}")
    return {**defaults, **given}


class ConnectorRegistry(Generic[Base]):
    """Connector classes by name. Nothing is imported before it is asked for."""

    def __init__(self, kind: str, base: type[Base], error: type[TransferConfigError]):
        self._kind, self._base, self._error = kind, base, error
        self._places: dict[str, tuple[str, str]] = {}

    def register(self, name: str, module_path: str, class_name: str) -> None:
        """Raises ValueError for a name that is taken."""
        if name in self._places:
            raise ValueError(f"{self._kind}_connector {name!r} is registered already")
        self._places[name] = (module_path, class_name)

    @property
    def names(self) -> str:
        """What is registered, for a message."""
        return ", ".join(sorted(self._places))

    def find(self, name: str, module_path: str | None) -> type[Base]:
        """The class `name`, from `module_path` where one is given. Raises the registry's error."""
        if module_path is not None:
            module, class_name = module_path, name
        elif name in self._places:
            module, class_name = self._places[name]
        else:
            raise self._error(
                f"unknown {self._kind}_connector {name!r}; known are {self.names}, "
                f"others need {self._kind}_connector_module_path"
            )
        try:
            found = getattr(importlib.import_module(module), class_name)
        except (ImportError, AttributeError) as problem:
            message = f"{self._kind}_connector {class_name!r} is not in {module}: {problem}"
            raise self._error(message) from problem
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise self._error(f"{module}.{class_name} is no {self._base.__name__}")
        return found
