"""Whatever happens to the API server, to the watches and to other replicas: changes are acted on."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from tests.cluster.base import Cluster
from tests.cluster.local import LocalCluster
from tests.integration.operator.blackhole import Blackhole
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World, spec

NAME = "app.kubernetes.io/name"
CONFLICT = 409
GROUP = "rbac.authorization.k8s.io"
StartOperator = Callable[..., OperatorProcess]


def _acts(world: World, replicas: int) -> None:
    """A change of the resource and a drift of a child are acted on."""
    world.change({"roles": {"encoder": {"replicas": replicas}}})
    world.eventually(lambda: world.replicas("demo-encoder") == replicas)
    world.delete("services", "demo-pd")
    world.eventually(lambda: world.get("services", "demo-pd"))


def test_an_api_server_that_restarts_under_it(world: World, start_operator: StartOperator) -> None:
    operator = start_operator()
    world.create()
    world.await_settled()
    world.cluster.restart_apiserver()
    _acts(world, 3)
    world.cluster.stop_apiserver(force=True)
    world.cluster.start_apiserver()
    _acts(world, 4)
    assert operator.exit_code is None


def test_what_was_deleted_while_it_could_not_see_is_noticed(
    world: World, start_operator: StartOperator
) -> None:
    """A new API server remembers no old events: the watch is told 410 Gone, and a new list must tell."""
    operator = start_operator()
    world.create()
    world.await_settled()
    made = {kind: sorted(world.names(kind)) for kind in ("networkpolicies", "services", "serviceaccounts")}
    assert all(made.values())
    operator.signal(signal.SIGSTOP)
    try:
        for plural, names in made.items():
            for child in names:
                world.delete(plural, child)
        # Nothing is left to be in a list: an empty one must be understood, too.
        world.eventually(lambda: not world.names("networkpolicies"))
        world.cluster.restart_apiserver()
    finally:
        operator.signal(signal.SIGCONT)
    for plural, names in made.items():
        world.eventually(lambda kind=plural, all_=names: sorted(world.names(kind)) == all_, operator.tail)


def test_a_storm_of_writes_by_others(world: World, start_operator: StartOperator) -> None:
    start_operator()
    world.create()
    world.await_settled()
    calm = threading.Event()
    gusts: list[int] = []

    def storm() -> None:
        while not calm.is_set():
            gusts.append(len(gusts))
            annotations = {"storm": str(len(gusts))}
            try:
                world.merge("deployments", "demo-pd", {"metadata": {"annotations": annotations}})
                world.merge("services", "demo-pd", {"metadata": {"labels": {NAME: "x"}}})
            except httpx.HTTPStatusError as error:
                if error.response.status_code != CONFLICT:
                    raise

    blowing = threading.Thread(target=storm)
    blowing.start()
    try:
        world.eventually(lambda: len(gusts) > 5)
        world.change({"roles": {"pd": {"replicas": 2}}})
        world.eventually(lambda: world.replicas("demo-pd") == 2)
    finally:
        calm.set()
        blowing.join()

    def healed() -> bool:
        found = world.get("services", "demo-pd")
        return found is not None and found["metadata"]["labels"][NAME] == "epd"

    world.eventually(healed)


def test_one_of_two_acts_and_the_other_takes_over(world: World, start_operator: StartOperator) -> None:
    first = start_operator("--leader-election", "--tick=0.5")
    world.eventually(lambda: first.metric("epd_operator_leader") == 1)
    second = start_operator("--leader-election", "--tick=0.5")
    world.create()
    world.await_settled()
    assert second.metric("epd_operator_leader") == 0
    assert second.metric("epd_operator_reconcile_seconds_count") == 0

    # One that dies is followed once its Lease has run out.
    first.kill()
    world.change({"roles": {"encoder": {"replicas": 3}}})
    world.eventually(lambda: world.replicas("demo-encoder") == 3, second.tail)
    assert second.metric("epd_operator_leader") == 1

    # One that ends in order gives its Lease back.
    third = start_operator("--leader-election", "--tick=0.5")
    assert second.stop() == 0
    world.change({"roles": {"encoder": {"replicas": 4}}})
    world.eventually(lambda: world.replicas("demo-encoder") == 4, third.tail)


def test_a_leader_that_cannot_renew_stops_acting(world: World, start_operator: StartOperator) -> None:
    """A replica that was frozen finds another at work when it thaws."""
    first = start_operator("--leader-election", "--tick=0.5")
    world.eventually(lambda: first.metric("epd_operator_leader") == 1)
    second = start_operator("--leader-election", "--tick=0.5")
    first.signal(signal.SIGSTOP)
    try:
        world.eventually(lambda: second.metric("epd_operator_leader") == 1, second.tail)
    finally:
        first.signal(signal.SIGCONT)
    world.eventually(lambda: first.metric("epd_operator_leader") == 0, first.tail)
    assert second.metric("epd_operator_leader") == 1


def test_health_fails_when_the_watch_has_stalled(world: World, tmp_path: Path) -> None:
    if not isinstance(world.cluster, LocalCluster):
        pytest.skip("the certificate of this API server may not be good for an address of this host")
    blackhole = Blackhole(world.cluster.kubeconfig, tmp_path)
    scope = f"--namespace={world.name}"
    operator = OperatorProcess(blackhole.kubeconfig, tmp_path / "log", scope, "--stall=20").start()
    try:
        operator.wait_ready()
        assert operator.health() == 200
        with blackhole.swallowing():
            world.eventually(lambda: operator.health() == 503)
            assert operator.health("readyz") == 503
        world.eventually(lambda: operator.health() == 200, operator.tail)
        world.create()
        world.await_settled()
    finally:
        operator.stop()
        blackhole.close()


def test_a_token_that_expires_is_read_anew(
    defined: Cluster, world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The operator's own token stops being valid, and the file has another one by then."""
    account = world.call(
        "POST", world.path("serviceaccounts"), {"metadata": {"name": "operator"}, "kind": "ServiceAccount"}
    )["metadata"]["name"]
    world.call(
        "POST",
        f"/apis/{GROUP}/v1/clusterrolebindings",
        {
            "metadata": {"name": world.name},
            "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": world.name}],
        },
    )
    kubeconfig = tmp_path_factory.mktemp("token") / "kubeconfig"
    document = yaml.safe_load(defined.kubeconfig.read_text())

    def write(token: str) -> None:
        document["users"][0]["user"] = {"token": token}
        kubeconfig.write_text(yaml.safe_dump(document))

    first, second = world.make_token(account, "first"), world.make_token(account, "second")
    write(first)
    operator = OperatorProcess(kubeconfig, kubeconfig.with_name("log"), f"--namespace={world.name}")
    operator.start().wait_ready()
    try:
        write(second)
        world.call("DELETE", f"/api/v1/namespaces/{world.name}/secrets/first")
        world.create(spec=spec())
        world.await_settled()
        world.cluster.restart_apiserver()
        _acts(world, 3)
        assert operator.exit_code is None
    finally:
        operator.stop()
        world.call("DELETE", f"/apis/{GROUP}/v1/clusterrolebindings/{world.name}")
