"""What the command line sets, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Limits:
    """Bounds on what comes from outside. Times are seconds, sizes bytes.

    `max_buffered` is for the bodies of all requests together, until their answers have begun.
    `primer` bounds the whole encoding of one batch with its retries. `first_token` runs from the request to
    a PD until the first event of a stream, `answer` until a whole answer that is not streamed, `idle`
    between two pieces of a body or stream, in either direction.
    """

    max_body: int = 64 << 20
    max_items: int = 32
    max_in_flight: int = 1024
    max_buffered: int = 1 << 30
    connect: float = 2.0
    primer: float = 60.0
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
    """Where instances are discovered: the Services of the roles, in one namespace."""

    namespace: str
    pd: str
    encoder: str | None = None


@dataclass(frozen=True)
class Config:
    """One proxy: the instances of each role, or their Services, where it listens, and its limits.

    `api_keys` is the file of keys; without one the proxy is open.
    """

    encoders: tuple[Origin, ...] = ()
    pds: tuple[Origin, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    services: Services | None = None
    api_keys: Path | None = None
    limits: Limits = Limits()
