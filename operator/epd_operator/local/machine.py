"""What this machine offers to a deployment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..wire import StorePlaces
from .vllm import VllmInstallation

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Machine:
    """What a plan takes from this machine."""

    engine: str
    """The `epd-engine` executable."""
    proxy: str
    """The `epd-proxy` executable."""
    cores: int
    """Cores that the processes share."""
    environment: Mapping[str, str]
    """The environment that they inherit."""
    model: str
    """The model's absolute path or hub id."""
    places: StorePlaces
    """Where the tiers of the EC store are."""
    host: str
    """The address that the proxy binds."""
    proxy_port: int
    """The port that the proxy binds."""
    ports: Sequence[int]
    """Free ports, as many as `port_count` says."""
    vllm: VllmInstallation | None = None
    """Where the deployment's engine is vLLM."""
