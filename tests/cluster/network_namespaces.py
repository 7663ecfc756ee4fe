"""A process id, mount and network namespace for a node, joined to the host by one cable."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from .addresses import Network
from .command import POLL_S, ClusterError, Unavailable, run
from .processes import Processes

INIT = "init"
PEER = "eth0"
"""The node's end of the cable."""
TIMEOUT_S = 20.0

SHADOWED_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
"""What kubelet wants of the kernel. It is shown files of its own, so the machine's own settings stay."""


def check_possible() -> None:
    """Raises where the machine does not let us make a node."""
    if os.getuid() != 0:
        raise Unavailable("a node needs root")
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            raise Unavailable(f"a node needs the program {program}")
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        raise Unavailable(f"this machine allows no namespaces: {probe.stderr.strip()}")


def create(network: Network, processes: Processes, bound: dict[Path, Path]) -> None:
    """Makes the namespaces, and has `processes` start everything further in them.

    `bound` maps paths inside to directories of the cluster's own that stand in for the machine's.
    """
    flags = ["--mount", "--pid", "--net", "--fork", "--mount-proc", "--propagation", "private"]
    outer = processes.start(INIT, ["unshare", *flags, sys.executable, Path(__file__).with_name("reaper.py")])
    init = _child(outer, processes)
    processes.inside = ("nsenter", f"--target={init}", "--mount", "--pid", "--net", "--")
    _mounts(processes, bound)
    _cable(network, init, processes)


def _child(outer: int, processes: Processes) -> int:
    """The process that `unshare` forks, once the namespaces are its own."""
    deadline = time.monotonic() + TIMEOUT_S
    host = os.readlink("/proc/self/ns/net")
    while time.monotonic() < deadline:
        processes.check()
        for child in psutil.Process(outer).children():
            if child.name() != "unshare" and os.readlink(f"/proc/{child.pid}/ns/net") != host:
                return child.pid
        time.sleep(POLL_S)
    raise processes.failure(INIT, "did not make its namespaces")


def _mounts(processes: Processes, bound: dict[Path, Path]) -> None:
    inside = processes.inside
    # kubelet and containerd rely on mounts that spread from one to the other; none spreads to the host.
    run([*inside, "mount", "--make-rshared", "/"])
    run([*inside, "mount", "-t", "tmpfs", "-o", "mode=755", "epd-run", "/run"])
    for name, value in SHADOWED_SETTINGS.items():
        shadow = Path("/run") / name.replace("/", "-")
        run([*inside, "tee", shadow], stdin=f"{value}\n")
        run([*inside, "mount", "--bind", shadow, Path("/proc/sys") / name])
    for place, own in bound.items():
        own.mkdir(parents=True, exist_ok=True)
        run([*inside, "mkdir", "-p", place])
        run([*inside, "mount", "--bind", own, place])


def _cable(network: Network, init: int, processes: Processes) -> None:
    """One cable and no default route: pods reach the cluster and the host's end, nothing else."""
    inside = processes.inside
    run(["ip", "link", "add", network.interface, "type", "veth", "peer", "name", PEER, "netns", str(init)])
    run(["ip", "address", "add", f"{network.host}/30", "dev", network.interface])
    run(["ip", "link", "set", network.interface, "up"])
    run([*inside, "ip", "link", "set", "lo", "up"])
    run([*inside, "ip", "address", "add", f"{network.node}/30", "dev", PEER])
    run([*inside, "ip", "link", "set", PEER, "up"])
    # Without a route there a packet to a service is refused before kube-proxy's rules see it.
    run([*inside, "ip", "route", "add", network.services, "via", network.host])
    run([*inside, "tee", "/proc/sys/net/ipv4/ip_forward"], stdin="1\n")
    for target in (network.services, network.pods):
        try:
            run(["ip", "route", "add", target, "via", network.node])
        except ClusterError as error:
            raise Unavailable(f"the machine already uses the range {target}: {error}") from error
