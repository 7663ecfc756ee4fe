"""`--ec-transfer-config`: vLLM's field names, nothing unknown accepted."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]


class ECConfigError(ValueError):
    """A transfer config that cannot be used; the message names the field."""


@dataclass(frozen=True)
class ECTransferConfig:
    """How this instance takes part in encoder-cache transfer (vLLM's `ECTransferConfig`)."""

    ec_connector: str
    ec_role: ECRole
    engine_id: str | None = None
    ec_buffer_device: str | None = None
    ec_buffer_size: float | None = None
    ec_rank: int | None = None
    ec_parallel_size: int = 1
    ec_ip: str | None = None
    ec_port: int | None = None
    ec_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    ec_connector_module_path: str | None = None

    @property
    def is_producer(self) -> bool:
        return self.ec_role in ("ec_producer", "ec_both")

    @property
    def is_consumer(self) -> bool:
        return self.ec_role in ("ec_consumer", "ec_both")

    @property
    def is_encode_only(self) -> bool:
        return self.is_producer and not self.is_consumer

    @classmethod
    def from_json(cls, text: str) -> "ECTransferConfig":
        """Parses the flag's value. Raises `ECConfigError` that names the field at fault."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ECConfigError(f"not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ECConfigError("must be a JSON object")
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := sorted(set(document) - set(known)):
            raise ECConfigError(f"unknown field {unknown[0]!r}; known are {', '.join(known)}")
        for name in ("ec_connector", "ec_role"):
            if not isinstance(document.get(name), str):
                raise ECConfigError(f"{name!r} is needed and must be a string")
        if document["ec_role"] not in get_args(ECRole):
            raise ECConfigError(f"ec_role must be one of {', '.join(get_args(ECRole))}")
        if not isinstance(document.get("ec_connector_extra_config", {}), dict):
            raise ECConfigError("ec_connector_extra_config must be a JSON object")
        return cls(**document)


def read_extra_config(config: ECTransferConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config over `defaults`; a default's type is the key's type.

    Raises `ECConfigError` for a key that is not in `defaults` or a value of another type.
    """
    given = config.ec_connector_extra_config
    if unknown := sorted(set(given) - set(defaults)):
        raise ECConfigError(
            f"{config.ec_connector} does not know ec_connector_extra_config key {unknown[0]!r}; "
            f"known are {', '.join(defaults)}"
        )
    for key, value in given.items():
        wanted = type(defaults[key])
        if defaults[key] is None or type(value) is wanted or (wanted is float and type(value) is int):
            continue
        raise ECConfigError(f"ec_connector_extra_config key {key!r} must be a {wanted.__name__}")
    return {**defaults, **given}
