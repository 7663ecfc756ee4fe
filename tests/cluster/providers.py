"""Which kind of cluster is used: one that is named, else kind, else the harness' own."""

import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from .base import Cluster
from .build import binaries
from .command import ClusterError, Unavailable, Word, progress, run
from .images import base_image
from .local import LocalCluster, check_possible
from .node import NODE_PACKAGES
from .packages import ensure

KUBECONFIG_VARIABLE = "EPD_TEST_KUBECONFIG"
KIND_READY = "180s"


class NamedCluster(Cluster):
    """Any cluster, by a kubeconfig with all rights. It is used and left as it is."""

    def __init__(self, kubeconfig: Path) -> None:
        if not kubeconfig.is_file():
            raise ClusterError(f"{KUBECONFIG_VARIABLE} names {kubeconfig}, which is no file")
        self.kubeconfig = kubeconfig

    def stop(self) -> None:
        """Not ours to stop."""


class KindCluster(Cluster):
    """A cluster of kind's, in a container engine."""

    def __init__(self) -> None:
        self._name = f"epd-{uuid.uuid4().hex[:8]}"
        self._directory = Path(tempfile.mkdtemp(prefix="epd-kind-"))
        self.kubeconfig = self._directory / "kubeconfig"
        progress(f"kind: creating cluster {self._name}")
        options: list[Word] = ["--wait", KIND_READY, "--kubeconfig", self.kubeconfig]
        try:
            run(["kind", "create", "cluster", "--name", self._name, *options])
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def possible() -> bool:
        """Whether kind is installed and an engine answers."""
        if shutil.which("kind") is None:
            return False
        for engine in ("docker", "podman"):
            if shutil.which(engine) is not None:
                asked = subprocess.run([engine, "info"], capture_output=True, check=False)
                if asked.returncode == 0:
                    return True
        return False

    def stop(self) -> None:
        """Deletes the cluster."""
        run(["kind", "delete", "cluster", "--name", self._name])
        shutil.rmtree(self._directory, ignore_errors=True)

    def load_image(self, oci_archive: Path) -> None:
        """Into every node."""
        run(["kind", "load", "image-archive", oci_archive, "--name", self._name])

    def logs(self, component: str, lines: int = 100) -> str:
        """Of a component that kind runs as a pod."""
        pods = ["--namespace=kube-system", "logs", f"--selector=component={component}", f"--tail={lines}"]
        return run(["kubectl", f"--kubeconfig={self.kubeconfig}", *pods])


def start(*, with_node: bool) -> Cluster:
    """A cluster to test on. Raises `Unavailable` with the reason where there can be none."""
    if named := os.environ.get(KUBECONFIG_VARIABLE):
        return NamedCluster(Path(named).expanduser())
    if with_node and KindCluster.possible():
        return KindCluster()
    try:
        return LocalCluster.start(with_node=with_node)
    except Unavailable:
        # For a control plane alone our own is far quicker, so kind comes second there.
        if not with_node and KindCluster.possible():
            return KindCluster()
        raise


def prepare(*, with_node: bool) -> None:
    """What takes minutes the first time (compiling Kubernetes, packages, a base image) and then nothing."""
    if os.environ.get(KUBECONFIG_VARIABLE) or (with_node and KindCluster.possible()):
        return
    binaries()
    if with_node:
        check_possible(with_node=True)
        ensure(NODE_PACKAGES)
        base_image()
