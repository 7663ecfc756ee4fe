"""A control plane of these tests' own: they install and remove the definition, which a cluster has once."""

from collections.abc import Iterator

import pytest

from tests.cluster import providers, tools
from tests.cluster.base import Cluster
from tests.integration.chart.programs import Helm, Kubectl


@pytest.fixture(scope="package")
def control_plane() -> Iterator[Cluster]:
    with providers.start(with_node=False) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def kubectl(control_plane: Cluster) -> Kubectl:
    return Kubectl(tools.kubectl(), control_plane.kubeconfig)


@pytest.fixture(scope="package", params=[3, 4], ids=["helm3", "helm4"])
def offline_helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(tools.helm(request.param), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="package")
def helm(offline_helm: Helm, control_plane: Cluster) -> Helm:
    """Helm with all rights in the cluster."""
    return Helm(offline_helm.program, offline_helm.home, control_plane.kubeconfig)
