"""A node: containerd, kubelet, kube-proxy and DNS in namespaces of their own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from . import network_namespaces
from .addresses import Network
from .api import Api
from .build import Binaries
from .command import ClusterError, Unavailable, Word, progress, run
from .components import flags
from .control_plane import until
from .images import PAUSE_IMAGE, archive_identity, pause_image
from .packages import ensure
from .paths import REPOSITORY
from .pki import Pki
from .processes import Processes
from .slots import CGROUPS, Slot

CNI_PROGRAMS = "/usr/lib/cni"
NODE_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": f"{CNI_PROGRAMS}/ptp",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "dnsmasq-base": "dnsmasq",
}
"""Packages, each with what must be there of it."""
NODE_NAME = "node1"
CONTAINERD, KUBELET, KUBE_PROXY = "containerd", "kubelet", "kube-proxy"
DNS_SERVER, DNS_RECORDS = "dns-server", "dns-records"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CLUSTER_DOMAIN = "cluster.local"
KUBELET_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "pids", "devices", "freezer", "blkio", "systemd")


def check_possible() -> None:
    """Raises `Unavailable` with the reason where no node can be made."""
    network_namespaces.check_possible()
    lacking = [name for name in KUBELET_CONTROLLERS if not (CGROUPS / name / "cgroup.procs").exists()]
    if lacking:
        raise Unavailable(f"a node needs version 1 cgroups, without which there are: {' '.join(lacking)}")


class Node:
    """The one node of a cluster. `enter`, then start the control plane, then `start`."""

    def __init__(self, slot: Slot, programs: Binaries, pki: Pki, processes: Processes) -> None:
        self._slot = slot
        self._state = slot.state / "node"
        self._programs = programs
        self._pki = pki
        self._processes = processes

    @property
    def network(self) -> Network:
        """The node's addresses."""
        return self._slot.network

    def enter(self) -> None:
        """Makes the namespaces; whatever starts from now on starts in them, and containerd is the first."""
        ensure(NODE_PACKAGES)
        self._state.mkdir()
        stand_ins = {
            Path("/var/lib/kubelet"): self._state / "var-lib-kubelet",
            Path("/var/lib/cni"): self._state / "var-lib-cni",
            Path("/var/log"): self._state / "var-log",
        }
        network_namespaces.create(self.network, self._processes, stand_ins)
        self._make_cgroups()
        self._slot.containers.mkdir(parents=True, exist_ok=True)
        config = self._write("containerd.toml", _containerd_config(self._slot.containers, self._state))
        self._write("cni/10-pods.conflist", json.dumps(_cni_config(self.network)))
        self._processes.start(CONTAINERD, ["containerd", "--config", config])

    def start(self, api: Api) -> None:
        """kubelet and the rest, and waits until pods can run."""
        began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        until(self._processes, CONTAINERD, "serving", self._serves)
        self._remove_old_containers()
        self.load_image(pause_image(self._programs))
        self._start_dns()
        self._processes.start(KUBELET, self._kubelet())
        self._processes.start(KUBE_PROXY, self._kube_proxy())
        until(self._processes, KUBELET, "ready", _ready_since(api, began))

    def load_image(self, archive: Path) -> None:
        """Brings an image into containerd, unless it is there."""
        identity = set(archive_identity(archive))
        if any(identity <= set(line.split()) for line in self.ctr("images", "list").splitlines()):
            return
        progress(f"loading {archive.name}")
        self.ctr("images", "import", str(archive))

    def ctr(self, *arguments: str) -> str:
        """containerd's own client, on Kubernetes' images and containers."""
        program = shutil.which("ctr") or "ctr"
        command = [program, "--address", CONTAINERD_SOCKET, "--namespace", "k8s.io", *arguments]
        return run([*self._processes.inside, *command])

    def _serves(self) -> bool:
        try:
            self.ctr("version")
        except ClusterError:
            return False
        return True

    def _remove_old_containers(self) -> None:
        """Those of earlier clusters in this slot; only the images are meant to stay."""
        if old := self.ctr("containers", "list", "--quiet").split():
            self.ctr("containers", "delete", *old)

    def _make_cgroups(self) -> None:
        """kubelet puts pods below a cgroup that must exist in every hierarchy."""
        for controller in KUBELET_CONTROLLERS:
            group = CGROUPS / controller / self._slot.cgroup
            group.mkdir(exist_ok=True)
            if controller == "cpuset":
                # A new one has no processor and no memory, and nothing could run in it.
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((group.parent / file).read_text())

    def _write(self, name: str, text: str) -> Path:
        path = self._state / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def _kubelet(self) -> list[Word]:
        resolver = self._write("resolv.conf", f"nameserver {self.network.node}\n")
        settings = _kubelet_config(self.network, self._slot.cgroup, self._pki, resolver, self._state)
        values = {
            "config": self._write("kubelet.yaml", yaml.safe_dump(settings)),
            "kubeconfig": self._pki.kubeconfig("node"),
            "hostname-override": NODE_NAME,
            "node-ip": self.network.node,
            "container-runtime": "remote",
            "container-runtime-endpoint": f"unix://{CONTAINERD_SOCKET}",
            "root-dir": self._state / "kubelet",
            "cert-dir": self._state / "kubelet-pki",
            "v": 2,
        }
        return [self._programs.path(KUBELET), *flags(values)]

    def _kube_proxy(self) -> list[Word]:
        values = {
            "kubeconfig": self._pki.kubeconfig("proxy"),
            "hostname-override": NODE_NAME,
            "proxy-mode": "iptables",
            "cluster-cidr": self.network.pods,
            # Rules follow an endpoint at once; by default they may lag for a second.
            "iptables-min-sync-period": "100ms",
            # The machine's connection tracking stays as it is.
            "conntrack-max-per-core": 0,
            "conntrack-min": 0,
            "conntrack-tcp-timeout-established": "0s",
            "conntrack-tcp-timeout-close-wait": "0s",
            "metrics-bind-address": "127.0.0.1:10249",
            "healthz-bind-address": "127.0.0.1:10256",
            "v": 2,
        }
        return [self._programs.path(KUBE_PROXY), *flags(values)]

    def _start_dns(self) -> None:
        """dnsmasq answers from a file of records that a process of ours keeps in step with the services."""
        records, pid = self._write("dns/records", ""), self._state / "dns/pid"
        options = [
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            "--conf-file=/dev/null",
            "--user=root",
        ]
        values = {
            "addn-hosts": records,
            "local": f"/{CLUSTER_DOMAIN}/",
            "listen-address": self.network.node,
            "pid-file": pid,
        }
        self._processes.start(DNS_SERVER, ["dnsmasq", *options, "--bind-interfaces", *flags(values)])
        module: list[Word] = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-m", "tests.cluster.dns"]
        arguments: list[Word] = [self._pki.kubeconfig("admin"), records, pid, CLUSTER_DOMAIN]
        self._processes.start(DNS_RECORDS, [*module, *arguments])

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node (in its namespaces)."""
        return subprocess.run(
            [*self._processes.inside, *command], capture_output=True, text=True, check=False
        )


def _containerd_config(root: Path, state: Path) -> str:
    """Written by hand, since Python writes no TOML."""
    return f"""version = 2
root = "{root}"
state = "/run/containerd"
[grpc]
address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
# Inside a container of our own, scores below our own may not be set.
restrict_oom_score_adj = true
sandbox_image = "{PAUSE_IMAGE}"
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PROGRAMS}"
conf_dir = "{state / "cni"}"
"""


def _cni_config(network: Network) -> Mapping[str, Any]:
    """A cable to each pod, and an address from the pods' range."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": network.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-addresses",
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}],
    }


def _kubelet_config(network: Network, cgroup: str, pki: Pki, resolver: Path, state: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.node,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.path("ca.crt"))},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        # The machine's disk may be nearly full of things that are none of kubelet's business.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
        "clusterDNS": [network.node],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(resolver),
        "volumePluginDir": str(state / "volume-plugins"),
        "nodeStatusUpdateFrequency": "2s",
        "featureGates": {"SizeMemoryBackedVolumes": True},
    }


def _ready_since(api: Api, began: str) -> Callable[[], bool]:
    """A heartbeat of this kubelet, not one that an earlier one left; and no taint that keeps pods away."""

    def condition() -> bool:
        node = api.json(f"/api/v1/nodes/{NODE_NAME}")
        ready = [
            c for c in node["status"].get("conditions", ()) if c["type"] == "Ready" and c["status"] == "True"
        ]
        return any(c["lastHeartbeatTime"] >= began for c in ready) and not node["spec"].get("taints")

    return condition
