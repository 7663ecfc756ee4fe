"""A control plane of these tests' own: a cluster has one server of the metrics APIs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import config

from tests.cluster import providers, tools
from tests.cluster.base import Cluster
from tests.cluster.fixtures import Namespace
from tests.integration.chart.programs import Helm, Kubectl
from tests.integration.operator.definitions import define
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World
from tests.integration.scaling.adapters import AdapterProcess, Installed, adapting


@pytest.fixture(scope="package")
def control_plane() -> Iterator[Cluster]:
    with providers.start(with_node=False) as cluster:
        with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
            define(connection)
        yield cluster


@pytest.fixture(scope="package")
def kubectl(control_plane: Cluster) -> Kubectl:
    return Kubectl(tools.kubectl(), control_plane.kubeconfig)


@pytest.fixture(scope="package")
def installed(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    made = Installed(kubectl, Helm(tools.helm(4), tmp_path_factory.mktemp("helm")))
    yield made
    made.remove()


@pytest.fixture(scope="module")
def adapter(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterProcess]:
    """An adapter that no test of the module may stop for good."""
    with adapting(installed, tmp_path_factory.mktemp("adapter")) as process:
        yield process


@pytest.fixture
def world(namespace: Namespace) -> Iterator[World]:
    """A namespace in a control plane that knows the resource."""
    found = World(namespace)
    yield found
    found.close()


@pytest.fixture
def start_operator(world: World, tmp_path: Path) -> Iterator[Callable[..., OperatorProcess]]:
    """Starts operators of the test's own namespace, and ends those that still run."""
    started: list[OperatorProcess] = []

    def start(*arguments: str) -> OperatorProcess:
        log = tmp_path / f"operator-{len(started)}.log"
        process = OperatorProcess(world.cluster.kubeconfig, log, f"--namespace={world.name}", *arguments)
        started.append(process.start())
        return process.wait_ready()

    yield start
    for process in started:
        if process.exit_code is None:
            process.stop()
