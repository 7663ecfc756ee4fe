"""EndpointSlices read: which addresses of a role may get traffic.

Pure functions over the objects as the API server gives them, of `discovery.k8s.io/v1` and `v1beta1` alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from epd_proxy.config import Origin

SERVICE_LABEL = "kubernetes.io/service-name"
PORT_NAME = "http"

Slice = Mapping[str, Any]


def service_of(piece: Slice) -> str:
    """The Service that a slice belongs to."""
    return str(piece["metadata"].get("labels", {}).get(SERVICE_LABEL, ""))


def usable(slices: Iterable[Slice]) -> dict[Origin, str]:
    """The addresses of one Service's pods that take new work, each with the pod's identity.

    While endpoints are moved between slices one may stand in two, of which one is out of date; a pod that
    has begun to end never comes back, so one word of that is enough. A pod with addresses of both families
    is one instance, by its IPv4 address.
    """
    found: dict[str, Origin] = {}
    ending: set[str] = set()
    for piece in sorted(slices, key=lambda one: (str(one.get("addressType")), one["metadata"]["name"])):
        port = _port(piece)
        for endpoint in _endpoints(piece):
            address = endpoint["addresses"][0]  # all of them are the same pod
            who = _identity(endpoint, f"{address} {port}")
            conditions = endpoint.get("conditions") or {}
            if conditions.get("terminating"):
                ending.add(who)
            elif port is not None and _serves(conditions):
                found.setdefault(who, _origin(address, port))
    return {origin: who for who, origin in found.items() if who not in ending}


def _endpoints(piece: Slice) -> Iterator[Mapping[str, Any]]:
    if piece.get("addressType") in ("IPv4", "IPv6"):
        yield from (one for one in piece.get("endpoints") or () if one.get("addresses"))


def _port(piece: Slice) -> int | None:
    return next((one.get("port") for one in piece.get("ports") or () if one.get("name") == PORT_NAME), None)


def _serves(conditions: Mapping[str, Any]) -> bool:
    """What is not said counts as true. Where a Service publishes unready addresses, only `serving` tells."""
    return all(conditions.get(name) is not False for name in ("ready", "serving"))


def _identity(endpoint: Mapping[str, Any], where: str) -> str:
    """The pod, or the place for what is no pod (slices can be made by hand)."""
    target = endpoint.get("targetRef") or {}
    return str(target.get("uid") or where)


def _origin(address: str, port: int) -> Origin:
    host = f"[{address}]" if ":" in address else address
    return Origin.parse(f"http://{host}:{port}")
