from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import tools
from tests.cluster.base import Cluster
from tests.cluster.images import build_image
from tests.integration.chart.programs import CHART, Helm, Kubectl
from tests.support.digits import Reference
from tests.support.engines import engine, proxy
from tests.support.processes import Server, running

PARTS = ("operator", "proxy", "engine")  # of which the images are built for a cluster
VALUES = (
    "image.registry=localhost,image.tag=e2e,image.pullPolicy=Never",
    # Autoscalers have what to ask, and see within seconds what changes.
    "metricsAdapter.enabled=true,metricsAdapter.extraArgs={--interval=0.5,--window=5,--stale=10}",
)


@dataclass
class Deployment:
    """Two encoders and two PDs on one store behind a proxy."""

    encoders: list[Server]
    pds: list[Server]
    proxy: Server
    store: Path

    def entry(self, key: str) -> Path:
        (path,) = self.store.glob(f"*/{key}/encoder_cache.safetensors")
        return path

    def newest_entry(self) -> Path:
        return max(self.store.glob("*/*/encoder_cache.safetensors"), key=lambda p: p.stat().st_mtime_ns)


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("e2e")
    store = folder / "store"
    store.mkdir()
    encoders = [engine(f"encoder-{i}", folder, role="ec_producer", store=store) for i in range(2)]
    # Room for one picture of the largest size: a second one evicts it, and the store is asked again.
    small = ["--encoder-cache-size", "16"]
    pds = [engine(f"pd-{i}", folder, role="ec_consumer", store=store, extra=small) for i in range(2)]
    front = proxy(folder, encoders, pds)
    with running(*encoders, *pds, front):
        yield Deployment(encoders, pds, front, store)


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def helm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tools.helm(4), tmp_path_factory.mktemp("helm"), cluster.kubeconfig)


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(tools.kubectl(), cluster.kubeconfig)


@pytest.fixture(scope="session")
def operator(cluster: Cluster, helm: Helm, kubectl: Kubectl) -> Iterator[None]:
    for part in PARTS:
        # Without NIXL, which nothing here uses.
        image = build_image(
            f"images/{part}/Dockerfile",
            f"localhost/epd-{part}:e2e",
            extra=part,
            build_args={"EXTRAS": part} if part == "engine" else None,
        )
        cluster.load_image(image)
    values = [f"--set={value}" for value in VALUES]
    kubectl("create", "namespace", "epd-system")
    # An API server as old as this one breaks off a server-side apply of an APIService.
    helm("install", "epd", str(CHART), "-n", "epd-system", "--server-side=false", *values)
    deployment = ["-n", "epd-system", "deployment", "-l", "app.kubernetes.io/instance=epd"]
    kubectl("wait", "--for=condition=Available", "--timeout=110s", *deployment)
    yield
    helm("uninstall", "epd", "-n", "epd-system")
