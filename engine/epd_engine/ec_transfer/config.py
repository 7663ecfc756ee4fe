"""`--ec-transfer-config`: vLLM's field names, nothing unknown accepted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from epd_engine.connectors import TransferConfigError, parse_config, read_extra

ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]


class ECConfigError(TransferConfigError):
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
        return cls(**parse_config(text, cls, "ec", get_args(ECRole), ECConfigError))


def read_extra_config(config: ECTransferConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The extra config over `defaults`. Raises `ECConfigError` as `connectors.read_extra` does."""
    return read_extra(config.ec_connector, "ec", config.ec_connector_extra_config, defaults, ECConfigError)
