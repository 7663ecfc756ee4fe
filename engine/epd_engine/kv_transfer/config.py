"""`--kv-transfer-config`: vLLM's field names, nothing unknown accepted."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
# Fields of vLLM's that stand for what is not done here: only the value that asks for nothing passes.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "enable_permute_local_kv": (False,),
    "kv_load_failure_policy": ("fail",),
    "kv_parallel_size": (1,),
}


class KVConfigError(ValueError):
    """A transfer config that cannot be used; the message names the field."""


@dataclass(frozen=True)
class KVTransferConfig:
    """How this instance takes part in the transfer of KV (vLLM's `KVTransferConfig`)."""

    kv_connector: str
    kv_role: KVRole
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_buffer_size: float | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str | None = None
    kv_port: int | None = None
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "fail"

    @property
    def is_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")

    @classmethod
    def from_json(cls, text: str) -> "KVTransferConfig":
        """Parses the flag's value. Raises `KVConfigError` that names the field at fault."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise KVConfigError(f"not JSON: {error}") from error
        if not isinstance(document, dict):
            raise KVConfigError("must be a JSON object")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := sorted(set(document) - set(known)):
            raise KVConfigError(f"unknown field {unknown[0]!r}; known are {', '.join(known)}")
        for name in ("kv_connector", "kv_role"):
            if not isinstance(document.get(name), str):
                raise KVConfigError(f"{name!r} is needed and must be a string")
        if document["kv_role"] not in get_args(KVRole):
            raise KVConfigError(f"kv_role must be one of {', '.join(get_args(KVRole))}")
        for name in ("engine_id", "kv_ip", "kv_connector_module_path"):
            if not isinstance(document.get(name), str | None):
                raise KVConfigError(f"{name} must be a string")
        for name, values in _NEUTRAL.items():
            if document.get(name, values[0]) not in values:
                raise KVConfigError(f"{name} must be {json.dumps(values[0])}, anything else is not supported")
        if not isinstance(document.get("kv_connector_extra_config", {}), dict):
            raise KVConfigError("kv_connector_extra_config must be a JSON object")
        return cls(**document)


def read_extra_config(config: KVTransferConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config over `defaults`; a default's type is the key's type.

    Raises `KVConfigError` for a key that is not in `defaults` or a value of another type.
    """
    given = config.kv_connector_extra_config
    if unknown := sorted(set(given) - set(defaults)):
        raise KVConfigError(
            f"{config.kv_connector} does not know kv_connector_extra_config key {unknown[0]!r}; "
            f"known are {', '.join(defaults)}"
        )
    for key, value in given.items():
        wanted = type(defaults[key])
        if defaults[key] is None or type(value) is wanted or (wanted is float and type(value) is int):
            continue
        raise KVConfigError(f"kv_connector_extra_config key {key!r} must be a {wanted.__name__}")
    return {**defaults, **given}
