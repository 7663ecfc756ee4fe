"""`--kv-transfer-config`: vLLM's field names, nothing unknown accepted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from epd_engine.connectors import TransferConfigError, parse_config, read_extra

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
# Fields of vLLM's that stand for what is not done here: only the value that asks for nothing passes.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "enable_permute_local_kv": (False,),
    "kv_load_failure_policy": ("fail",),
    "kv_parallel_size": (1,),
}


class KVConfigError(TransferConfigError):
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
        document = parse_config(text, cls, "kv", get_args(KVRole), KVConfigError)
        for name, values in _NEUTRAL.items():
            if document.get(name, values[0]) not in values:
                raise KVConfigError(f"{name} must be {json.dumps(values[0])}, anything else is not supported")
        return cls(**document)


def read_extra_config(config: KVTransferConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config over `defaults`. Raises `KVConfigError` as `connectors.read_extra` does."""
    return read_extra(config.kv_connector, "kv", config.kv_connector_extra_config, defaults, KVConfigError)
