"""pytest fixtures: a control plane, a whole cluster, and a namespace for each test."""

import re
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import pytest

from . import providers
from .base import Cluster
from .command import POLL_S, ClusterError, Unavailable

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, CoreV1Api

SERVICE_ACCOUNT_S = 60.0
FIRST_WITHOUT_SECRETS = 24
"""The minor version from which a service account is complete without a secret that holds its token."""


@dataclass(frozen=True)
class Namespace:
    """A namespace of one test's own."""

    name: str
    cluster: Cluster
    client: "ApiClient"
    """Of the kubernetes package, with all rights in the cluster."""

    def __str__(self) -> str:
        return self.name


def _started(*, with_node: bool) -> Iterator[Cluster]:
    with providers.start(with_node=with_node) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A real API server, controller-manager and scheduler, without a node: starts in seconds."""
    yield from _started(with_node=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A whole cluster whose pods run."""
    yield from _started(with_node=True)


def _namespace(cluster: Cluster) -> Iterator[Namespace]:
    # Loading the package takes a second or two, which tests without a cluster need not pay.
    from kubernetes import client, config

    name = f"test-{uuid.uuid4().hex[:8]}"
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        core.create_namespace({"metadata": {"name": name}})
        try:
            _await_service_account(connection, name)
            yield Namespace(name, cluster, connection)
        finally:
            _delete_namespace(core, name)


def _delete_namespace(core: "CoreV1Api", name: str) -> None:
    """Not waited for: the name is never used again. The test may have deleted it, and it may be gone."""
    from kubernetes import client

    try:
        core.delete_namespace(name, propagation_policy="Background")
    except client.ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


def _await_service_account(connection: "ApiClient", namespace: str) -> None:
    """Before the namespace's service account is complete, no pod may be made in it."""
    from kubernetes import client

    minor = int(re.sub(r"\D", "", client.VersionApi(connection).get_code().minor))
    core = client.CoreV1Api(connection)
    deadline = time.monotonic() + SERVICE_ACCOUNT_S
    while time.monotonic() < deadline:
        accounts = [
            one
            for one in core.list_namespaced_service_account(namespace).items
            if one.metadata.name == "default"
        ]
        if accounts and (accounts[0].secrets or minor >= FIRST_WITHOUT_SECRETS):
            return
        time.sleep(POLL_S)
    raise ClusterError(
        f"namespace {namespace} has no complete service account after {SERVICE_ACCOUNT_S:.0f} s"
    )


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[Namespace]:
    """A namespace in the control plane; objects in it are controlled, but no pod runs."""
    yield from _namespace(control_plane)


@pytest.fixture
def cluster_namespace(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace in the whole cluster, where pods run."""
    yield from _namespace(cluster)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds what the chosen tests need before the first of them, whose time is limited."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for fixture, with_node in (("control_plane", False), ("cluster", True)):
        if fixture in used:
            try:
                providers.prepare(with_node=with_node)
            except Unavailable:
                # The fixture finds the same, and then skips the tests with the reason.
                pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """A cluster that cannot be had skips the test, with the reason."""
    return (yield from _skip_when_unavailable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """So does a thing that this kind of cluster cannot do."""
    return (yield from _skip_when_unavailable())


def _skip_when_unavailable() -> Generator[None, None, None]:
    try:
        return (yield)
    except Unavailable as reason:
        pytest.skip(str(reason))
