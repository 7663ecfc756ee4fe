"""The metrics adapter as real processes behind a real API server, with the rights that the chart gives."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.cluster.command import Unavailable
from tests.integration.chart.programs import CHART, Helm, Kubectl
from tests.integration.operator.operators import PATIENCE_S
from tests.support.processes import BIN, free_port
from tests.support.waiting import eventually

RELEASE, NAMESPACE = "epd", "epd-system"
NAME = "epd-epd-operator-metrics-adapter"
GROUPS = ("v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io", "v1beta1.external.metrics.k8s.io")
QUICK = ("--interval=0.5", "--window=2", "--stale=6", "--look-interval=1")


def address_of_this_host() -> str:
    """One that the API server takes for an endpoint: it refuses loopback addresses."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return str(one.address)
    raise Unavailable("this host has no address but its loopback interface's")


class Installed:
    """What the chart has of the adapter, without its pods: processes of this host stand in for them."""

    def __init__(self, kubectl: Kubectl, helm: Helm) -> None:
        self.kubectl = kubectl
        kubectl("create", "namespace", NAMESPACE)
        values = ["--set", "metricsAdapter.enabled=true,crds.install=false"]
        rendered = helm("template", RELEASE, str(CHART), "-n", NAMESPACE, "--kube-version=1.28.0", *values)
        for manifest in yaml.safe_load_all(rendered):
            labels = manifest["metadata"].get("labels", {})
            if labels.get("app.kubernetes.io/component") != "metrics-adapter":
                continue
            if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
                continue
            if manifest["kind"] == "Service":
                # Its endpoints are ours to write.
                del manifest["spec"]["selector"]
                manifest["spec"]["ports"][0]["targetPort"] = 8443
            kubectl.apply(manifest)

    def route_to(self, *adapters: "AdapterProcess") -> None:
        """Requests for the metrics APIs go to these."""
        address = address_of_this_host()
        subsets = [
            {"addresses": [{"ip": address}], "ports": [{"name": "https", "port": one.port}]}
            for one in adapters
        ]
        metadata = {"name": NAME, "namespace": NAMESPACE}
        body = {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
        self.kubectl.apply(body)

    def wait_available(self) -> None:
        """Until the API server reaches the adapter."""

        def available() -> bool:
            found = self.kubectl.json("get", "apiservice", *GROUPS)["items"]
            return all(
                any(
                    c["type"] == "Available" and c["status"] == "True"
                    for c in one.get("status", {}).get("conditions", [])
                )
                for one in found
            )

        try:
            eventually(available, PATIENCE_S)
        except AssertionError:
            raise AssertionError(self.kubectl("get", "apiservice", *GROUPS, "-o", "yaml")[-6000:]) from None

    def remove(self) -> None:
        """An API group whose server is gone would hold up the deletion of every namespace."""
        self.kubectl("delete", "apiservice", *GROUPS, "--ignore-not-found")


class AdapterProcess:
    """One `epd-operator metrics-adapter` with the rights of its ServiceAccount."""

    def __init__(self, kubectl: Kubectl, directory: Path, *arguments: str) -> None:
        self.port, self._health, self._metrics = free_port(), free_port(), free_port()
        self.log = directory / f"adapter-{self.port}.log"
        kubeconfig = directory / f"adapter-{self.port}.kubeconfig"
        config = yaml.safe_load(kubectl.kubeconfig.read_text())
        token = kubectl("-n", NAMESPACE, "create", "token", NAME).strip()
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        kubeconfig.write_text(yaml.safe_dump(config))
        self._argv = [
            str(BIN / "epd-operator"),
            "metrics-adapter",
            f"--kubeconfig={kubeconfig}",
            f"--service={NAME}",
            f"--secret={NAME}",
            f"--port={self.port}",
            f"--health-port={self._health}",
            f"--metrics-port={self._metrics}",
            *(arguments or QUICK),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "AdapterProcess":
        env = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdout=log, stderr=log, env=env | {"POD_NAMESPACE": NAMESPACE}
            )
        return self

    def wait_ready(self) -> "AdapterProcess":
        def ready() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            return self.health() == 200

        try:
            eventually(ready, PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"never ready:\n{self.log.read_text()[-4000:]}") from None
        return self

    def health(self, path: str = "readyz") -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self._health}/{path}", timeout=10).status_code
        except httpx.TransportError:
            return 0

    def said(self, message: str) -> int:
        """How often it logged that."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return sum(line["message"] == message for line in lines)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                code = self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"did not heed SIGTERM:\n{self.log.read_text()[-4000:]}") from None
            assert code == 0, self.log.read_text()[-4000:]


@contextmanager
def adapting(installed: Installed, directory: Path, *arguments: str) -> Iterator[AdapterProcess]:
    """An adapter that serves the metrics APIs while inside."""
    adapter = AdapterProcess(installed.kubectl, directory, *arguments).start()
    try:
        adapter.wait_ready()
        installed.route_to(adapter)
        installed.wait_available()
        yield adapter
    finally:
        adapter.stop()


def values(answer: Any) -> dict[str, str]:
    """Of a list of pods' metrics: the value of each, by name."""
    return {one["describedObject"]["name"]: one["value"] for one in answer["items"]}
