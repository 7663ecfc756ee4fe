"""Ports of this machine."""

import socket

from .errors import LocalError
from .machine import LOOPBACK


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so none comes twice."""
    sockets = [socket.create_server((host, 0), family=_family(host)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def check_port(host: str, port: int) -> None:
    """Raises LocalError, which names the way out, if the port cannot be bound."""
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        raise LocalError(
            f"cannot listen on {host} port {port} ({error.strerror}); "
            f"choose another with --port, or let one be found with --port 0"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
