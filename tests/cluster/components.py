"""The command lines of the control plane's components."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .addresses import Listen, Network
from .build import Binaries
from .command import Word
from .pki import FRONT_CA, Pki

ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"


def flags(values: Mapping[str, object]) -> list[str]:
    """`{"a-b": 1}` as `--a-b=1`."""
    return [f"--{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class ControlPlaneSpec:
    """What the command lines depend on."""

    state: Path
    programs: Binaries
    pki: Pki
    listen: Listen
    network: Network

    def etcd(self) -> list[Word]:
        """The store. Its data lasts as long as the cluster, so it need not reach the disk."""
        url, peer = self.listen.etcd_url, self.listen.etcd_peer_url
        values = {
            "data-dir": self.state / "etcd",
            "listen-client-urls": url,
            "advertise-client-urls": url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
        }
        return [self.programs.path("etcd"), "--unsafe-no-fsync", *flags(values)]

    def api_server(self, extra: Sequence[str] = ()) -> list[Word]:
        """The API server; `extra` comes last and wins."""
        pki = self.pki.path
        values = {
            "etcd-servers": self.listen.etcd_url,
            "bind-address": self.listen.address,
            "secure-port": self.listen.api,
            "advertise-address": self.listen.advertise,
            "tls-cert-file": pki("server.crt"),
            "tls-private-key-file": pki("server.key"),
            "client-ca-file": pki("ca.crt"),
            "token-auth-file": pki("tokens.csv"),
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": pki("sa.pub"),
            "service-account-signing-key-file": pki("sa.key"),
            "service-cluster-ip-range": self.network.services,
            "allow-privileged": "true",
            "kubelet-client-certificate": pki("kubelet-client.crt"),
            "kubelet-client-key": pki("kubelet-client.key"),
            "kubelet-preferred-address-types": "InternalIP",
        }
        return [self.programs.path(API_SERVER), *flags(values), *flags(self._aggregation()), *extra]

    def _aggregation(self) -> dict[str, object]:
        """What lets API servers of one's own (metrics, say) stand behind this one."""
        pki = self.pki.path
        return {
            "requestheader-client-ca-file": pki(f"{FRONT_CA}.crt"),
            "requestheader-allowed-names": "aggregator",
            "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "proxy-client-cert-file": pki("aggregator.crt"),
            "proxy-client-key-file": pki("aggregator.key"),
            # Straight to the endpoints: the API server's host may have no way to service addresses.
            "enable-aggregator-routing": "true",
        }

    def controller_manager(self) -> list[Word]:
        """The controllers, with short periods where a test would wait for them."""
        pki, kubeconfig = self.pki.path, self.pki.kubeconfig("controller-manager")
        values = {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "bind-address": "127.0.0.1",
            "port": 0,
            "secure-port": self.listen.controller_manager,
            "leader-elect": "false",
            "use-service-account-credentials": "true",
            "service-account-private-key-file": pki("sa.key"),
            "root-ca-file": pki("ca.crt"),
            "cluster-signing-cert-file": pki("ca.crt"),
            "cluster-signing-key-file": pki("ca.key"),
            "pvclaimbinder-sync-period": "1s",
            "horizontal-pod-autoscaler-sync-period": "1s",
            "horizontal-pod-autoscaler-downscale-stabilization": "5s",
        }
        return [self.programs.path(CONTROLLER_MANAGER), *flags(values)]

    def scheduler(self) -> list[Word]:
        """The scheduler."""
        kubeconfig = self.pki.kubeconfig("scheduler")
        values = {
            "kubeconfig": kubeconfig,
            "authentication-kubeconfig": kubeconfig,
            "authorization-kubeconfig": kubeconfig,
            "bind-address": "127.0.0.1",
            "port": 0,
            "secure-port": self.listen.scheduler,
            "leader-elect": "false",
        }
        return [self.programs.path(SCHEDULER), *flags(values)]


def audit_flags(directory: Path, level: str = "Metadata") -> tuple[list[str], Path]:
    """API server arguments that log every finished request, and the log: one JSON event a line."""
    directory.mkdir(exist_ok=True)
    policy, log = directory / "policy.yaml", directory / "audit.log"
    policy.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "audit.k8s.io/v1",
                "kind": "Policy",
                "omitStages": ["RequestReceived", "ResponseStarted"],
                "rules": [{"level": level}],
            }
        )
    )
    values = {"audit-policy-file": policy, "audit-log-path": log, "audit-log-mode": "blocking"}
    return flags(values), log
