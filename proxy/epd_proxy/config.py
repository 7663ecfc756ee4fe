"""What the command line sets, checked once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

ENCODER, PD, PREFILL, DECODE = "encoder", "pd", "prefill", "decode"
ROLES = (ENCODER, PD, PREFILL, DECODE)


@dataclass(frozen=True)
class Limits:
    """Bounds on what comes from outside. Times are seconds, sizes bytes.

    `max_buffered` is for the bodies of all requests together, until their answers have begun.
    `primer` bounds the whole encoding of one batch with its retries, `prefill` one request to a prefill
    instance. `first_token` runs from the request to a PD until the first event of a stream, `decode` the same
    with a decode instance, `answer` until a whole answer of either that is not streamed, `idle` between two
    pieces of a body or stream, in either direction.
    """

    max_body: int = 64 << 20
    max_items: int = 32
    max_in_flight: int = 1024
    max_buffered: int = 1 << 30
    connect: float = 2.0
    primer: float = 60.0
    prefill: float = 120.0
    decode: float = 60.0
    first_token: float = 120.0
    answer: float = 600.0
    idle: float = 60.0
    drain: float = 30.0


@dataclass(frozen=True)
class Origin:
    """The address of an instance: `http(s)://host:port`, nothing behind it."""

    url: str
    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Raises ValueError with the reason in words."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:8001")
        parts.hostname.encode("idna")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError(f"{url!r} must be scheme, host and port only, such as http://127.0.0.1:8001")
        tls = parts.scheme == "https"
        return cls(
            f"{parts.scheme}://{parts.netloc}", parts.hostname, parts.port or (443 if tls else 80), tls
        )


@dataclass(frozen=True)
class Services:
    """Where instances are discovered: the Services of the roles, by role, in one namespace."""

    namespace: str
    names: Mapping[str, str]


@dataclass(frozen=True)
class Config:
    """One proxy: the instances of each role, or their Services, where it listens, and its limits.

    `api_keys` is the file of keys; without one the proxy is open.
    """

    instances: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    services: Services | None = None
    api_keys: Path | None = None
    limits: Limits = Limits()

    @property
    def roles(self) -> tuple[str, ...]:
        """The deployment's roles: the encoder, and what runs the language model."""
        known = {*self.instances, *(self.services.names if self.services else ())}
        return (ENCODER, PREFILL, DECODE) if known & {PREFILL, DECODE} else (ENCODER, PD)


def topology_problem(named: Collection[str], suffix: str) -> str | None:
    """Why these roles make no deployment, in terms of the flags `--ROLE<suffix>`; None where they do."""
    flags = {role: f"--{role}{suffix}" for role in ROLES}
    halves = [role for role in (PREFILL, DECODE) if role in named]
    if PD in named and halves:
        return f"{flags[PD]} does both steps by itself, so {flags[halves[0]]} has no meaning beside it"
    if len(halves) == 1:
        (other,) = {PREFILL, DECODE}.difference(halves)
        return f"{flags[halves[0]]} needs {flags[other]}: one hands over to the other"
    if PD not in named and not halves:
        return f"{flags[PD]} is needed, or {flags[PREFILL]} and {flags[DECODE]}"
    return None
