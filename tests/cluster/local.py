"""The harness' own cluster: the real components as processes of this machine."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import node as nodes
from .addresses import on_the_node, on_this_host
from .base import Cluster
from .build import Binaries, binaries
from .command import Unavailable, tail
from .components import ControlPlaneSpec, audit_flags
from .control_plane import ControlPlane
from .pki import Pki
from .processes import Processes
from .slots import Slot

READY = "ready"
"""A file in the state directory of a cluster that came up."""
NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


class LocalCluster(Cluster):
    """A control plane, and with `with_node` a node to run pods. Made by `start`."""

    def __init__(self, slot: Slot, programs: Binaries, *, with_node: bool) -> None:
        self._slot = slot
        self._programs = programs
        self._processes = Processes(slot.state)
        self._pki = Pki(slot.state / "pki")
        self._listen = on_the_node(slot.network) if with_node else on_this_host(slot.network)
        spec = ControlPlaneSpec(slot.state, programs, self._pki, self._listen, slot.network)
        self._control_plane = ControlPlane(spec, self._processes)
        self._node = nodes.Node(slot, programs, self._pki, self._processes) if with_node else None
        self._extra: list[str] = []
        self._released = False
        self.kubeconfig = self._pki.kubeconfig("admin")

    @classmethod
    def start(
        cls, *, with_node: bool, slot: Slot | None = None, apiserver_args: Sequence[str] = ()
    ) -> "LocalCluster":
        """A running cluster, in a free slot unless one is given (which is released with the cluster)."""
        slot = slot or Slot.take_free()
        try:
            check_possible(with_node=with_node)
            slot.clean()
            cluster = cls(slot, binaries(), with_node=with_node)
        except BaseException:
            slot.release()
            raise
        try:
            cluster._start(apiserver_args)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def _start(self, apiserver_args: Sequence[str]) -> None:
        self._slot.state.mkdir(mode=0o700)
        self._extra = list(apiserver_args)
        addresses = {"127.0.0.1", self._listen.address, self._slot.network.first_service}
        names = [*(f"DNS:{name}" for name in NAMES), *(f"IP:{address}" for address in sorted(addresses))]
        self._pki.create(self._listen.server, names)
        if self._node is not None:
            self._node.enter()
        self._control_plane.start(self._extra)
        if self._node is not None:
            self._node.start(self._control_plane.api())
        (self._slot.state / READY).touch()

    def stop(self) -> None:
        """Kills everything: nothing in it is worth an orderly end."""
        if self._released:
            return
        self._released = True
        try:
            self._processes.kill_all()
            self._slot.clean()
        finally:
            self._slot.release()

    def leave_running(self) -> None:
        """Lets go of the cluster; it goes on when this process ends."""
        self._released = True
        self._slot.release()

    @property
    def node_ip(self) -> str:
        """The node's end of the cable to this host. Service addresses are reachable from here, too."""
        return self._with_node().network.node

    @property
    def host_ip(self) -> str:
        """The host's end of it."""
        return self._with_node().network.host

    def load_image(self, oci_archive: Path) -> None:
        """Into the node's containerd, unless it is there. Images are kept from one cluster to the next."""
        self._with_node().load_image(oci_archive)

    def logs(self, component: str, lines: int = 100) -> str:
        """The end of a component's log."""
        return tail(self._processes.log(component), lines)

    def stop_apiserver(self, *, force: bool = False) -> None:
        """Ends the API server; etcd keeps the data."""
        self._control_plane.stop_api_server(force=force)

    def start_apiserver(self, extra_args: Sequence[str] | None = None) -> None:
        """Starts it again, at the same address."""
        if extra_args is not None:
            self._extra = list(extra_args)
        self._control_plane.start_api_server(self._extra)

    def enable_audit(self, level: str = "Metadata") -> Path:
        """Restarts the API server with an audit log beside the arguments it has."""
        arguments, log = audit_flags(self._slot.state / "audit", level)
        self.restart_apiserver([*(one for one in self._extra if not one.startswith("--audit-")), *arguments])
        return log

    def on_node(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in the node's namespaces."""
        return self._with_node().execute(*command)

    def _with_node(self) -> nodes.Node:
        if self._node is None:
            raise Unavailable("a control plane alone has no node")
        return self._node


def check_possible(*, with_node: bool) -> None:
    """Raises `Unavailable` with the reason where this machine cannot run such a cluster."""
    if shutil.which("openssl") is None:
        raise Unavailable("needs the program openssl")
    if with_node:
        nodes.check_possible()
