"""Fixtures of the operator's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kubernetes import config

from tests.cluster.base import Cluster
from tests.cluster.fixtures import Namespace
from tests.integration.operator.definitions import define
from tests.integration.operator.operators import OperatorProcess, running
from tests.integration.operator.world import World

StartOperator = Callable[..., OperatorProcess]


@pytest.fixture(scope="session")
def defined(control_plane: Cluster) -> Cluster:
    """The control plane, with the resource's definition."""
    with config.new_client_from_config(str(control_plane.kubeconfig)) as connection:
        define(connection)
    return control_plane


@pytest.fixture
def world(defined: Cluster, namespace: Namespace) -> Iterator[World]:
    """A namespace in a control plane that knows the resource."""
    found = World(namespace)
    yield found
    found.close()


@pytest.fixture(scope="module")
def shared_operator(defined: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator for the whole cluster, for tests that need nothing special of it.

    No test of a module that uses it may start another one: the two would do the same work.
    """
    with running(defined.kubeconfig, tmp_path_factory.mktemp("operator") / "log") as process:
        yield process


@pytest.fixture
def start_operator(world: World, tmp_path: Path) -> Iterator[StartOperator]:
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
