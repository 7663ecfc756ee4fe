"""Who listens where."""

import socket
from dataclasses import dataclass

API_PORT = 6443


@dataclass(frozen=True)
class Network:
    """The addresses of the cluster in one slot.

    All lie in 198.18.0.0/15, which is set aside for tests of networks: nothing real can be there, so no route
    of the machine is shadowed.
    """

    slot: int

    @property
    def host(self) -> str:
        """The host's end of the cable to the node."""
        return f"198.18.{self.slot}.1"

    @property
    def node(self) -> str:
        """The node's end of it."""
        return f"198.18.{self.slot}.2"

    @property
    def pods(self) -> str:
        """The range of pods."""
        return f"198.18.{128 + self.slot}.0/24"

    @property
    def services(self) -> str:
        """The range of services."""
        return f"198.19.{self.slot}.0/24"

    @property
    def first_service(self) -> str:
        """The service `kubernetes` itself."""
        return f"198.19.{self.slot}.1"

    @property
    def interface(self) -> str:
        """The host's end of the cable, by name; the node's is `PEER`."""
        return f"epdk{self.slot}"


@dataclass(frozen=True)
class Listen:
    """Addresses of the control plane."""

    address: str
    api: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int
    advertise: str
    """What the service `kubernetes` points at; the API server refuses a loopback address there."""

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self.address}:{self.api}"

    @property
    def etcd_url(self) -> str:
        """Where etcd serves."""
        return f"http://127.0.0.1:{self.etcd}"

    @property
    def etcd_peer_url(self) -> str:
        """Where etcd would talk to its peers."""
        return f"http://127.0.0.1:{self.etcd_peer}"


def on_the_node(network: Network) -> Listen:
    """In the cluster's own network namespace, where the usual ports are free."""
    return Listen(network.node, API_PORT, 2379, 2380, 10257, 10259, network.node)


def on_this_host(network: Network) -> Listen:
    """Free ports of the loopback interface. Nobody listens at the advertised address: no pod will ask."""
    sockets = [socket.socket() for _ in range(5)]
    try:
        # All at once, so that no port is handed out twice.
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        api, etcd, peer, manager, scheduler = (int(one.getsockname()[1]) for one in sockets)
    finally:
        for one in sockets:
            one.close()
    return Listen("127.0.0.1", api, etcd, peer, manager, scheduler, network.node)
