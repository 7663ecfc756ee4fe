"""The command line of the metrics adapter."""

import argparse
import os
from dataclasses import dataclass

from .objects import CUSTOM, EXTERNAL
from .scraper import Pace

_GROUPS = {"custom": CUSTOM, "external": EXTERNAL}
_DAY_S = 86400.0


@dataclass(frozen=True)
class AdapterOptions:
    """What the command line says."""

    namespaces: tuple[str, ...]
    """Empty: the whole cluster."""
    groups: tuple[str, ...]
    """The API groups that are served."""
    port: int
    metrics_port: int
    health_port: int
    service: str
    """The Service's name, to which serving certificates are made out."""
    namespace: str
    """Where the Service and the Secret are."""
    secret: str
    certificate_s: float
    """A serving certificate's life."""
    look_s: float
    """Between two looks at the authority, and at whom the API server trusts."""
    pace: Pace


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that the operator has not."""
    add, pace = parser.add_argument, Pace()
    add("--service", metavar="NAME", required=True, help="the Service in front, in POD_NAMESPACE")
    add(
        "--secret", metavar="NAME", required=True, help="the Secret that keeps the authority, made if missing"
    )
    add("--port", type=int, default=8443, help="port of the metrics APIs")
    add(
        "--api",
        dest="apis",
        choices=tuple(_GROUPS),
        action="append",
        help="serve this metrics API only, where another program serves the other (all if not given)",
    )

    def seconds(name: str, default: float, text: str) -> None:
        add(name, type=float, metavar="SECONDS", default=default, help=text)

    seconds("--interval", pace.interval_s, "ask each pod this often")
    seconds("--window", pace.window_s, "average gauges and compare counters over so long")
    seconds("--stale", pace.stale_s, "a pod silent for so long has no metrics")
    seconds("--certificate-lifetime", 30 * _DAY_S, "of serving certificates")
    seconds("--look-interval", 10.0, "look at the Secret, and at whom the API server trusts, this often")


def adapter_options(given: argparse.Namespace) -> AdapterOptions:
    """What was given."""
    return AdapterOptions(
        namespaces=tuple(sorted(set(given.namespaces))),
        groups=tuple(_GROUPS[one] for one in _GROUPS if one in (given.apis or _GROUPS)),
        port=given.port,
        metrics_port=given.metrics_port,
        health_port=given.health_port,
        service=given.service,
        namespace=os.environ.get("POD_NAMESPACE") or "default",
        secret=given.secret,
        certificate_s=given.certificate_lifetime,
        look_s=given.look_interval,
        pace=Pace(given.interval, given.window, given.stale),
    )
