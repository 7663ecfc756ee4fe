"""What people are told of scaling: two scalers, load, a bottleneck; and encoders that come from none."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.base import Cluster
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import PLURAL, World, spec
from tests.integration.scaling.adapters import QUICK, Installed, adapting
from tests.integration.scaling.fleet import fleet
from tests.integration.scaling.test_hand_over import settle

StartOperator = Callable[..., OperatorProcess]


def scaler(name: str, target: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "Helm"}},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicas": 1,
            "maxReplicas": 3,
        },
    }


def test_two_scalers_are_named_until_one_is_gone(world: World, start_operator: StartOperator) -> None:
    start_operator()
    with fleet(world, "encoder", "pd"):
        world.create(spec=spec(roles={"encoder": {"replicas": 1}, "pd": {}}))
        world.await_condition("EncoderReady", "AllReady")
        world.await_condition("PDReady", "AllReady")
        for target in ("demo-pd", "demo-encoder"):
            world.call("POST", world.path("horizontalpodautoscalers"), scaler(f"mine-{target}", target))
        condition = world.await_condition("EncoderReady", "TwoScalers")
        assert condition["status"] == "True", "what runs goes on"
        assert "`replicas` and HorizontalPodAutoscaler mine-demo-encoder" in condition["message"]
        assert world.await_condition("Degraded", "TwoScalers")["status"] == "True"
        assert world.reason("PDReady") == "AllReady", "one alone is fine"
        world.eventually(
            lambda: any(
                one["reason"] == "TwoScalers" and one["type"] == "Warning" for one in world.listed("events")
            )
        )
        world.delete("horizontalpodautoscalers", "mine-demo-encoder")
        world.await_condition("EncoderReady", "AllReady")


def test_load_and_a_bottleneck_are_told_with_their_numbers(
    world: World, start_operator: StartOperator
) -> None:
    start_operator("--load-interval=0.5", "--bottleneck-after=3")

    def roles() -> Any:
        return (world.get(PLURAL, "demo") or {}).get("status", {}).get("roles", {})

    def told() -> list[str]:
        return [one["message"] for one in world.listed("events") if one["reason"] == "Bottleneck"]

    with fleet(world, "encoder", "pd") as where:
        world.create(spec=spec(roles={"encoder": {"replicas": 2}, "pd": {"replicas": 1}}))
        settle(where, "encoder", 2)
        world.eventually(lambda: roles().get("load") == "E 0% PD 0%", roles)
        where.load |= {"encoder": 3.0, "pd": 0.5}
        world.eventually(
            lambda: roles()["encoder"].get("load") == 150 and roles()["pd"].get("load") == 50, roles
        )
        assert roles()["load"] == "E 150% PD 50%"
        world.eventually(lambda: len(told()) == 1)
        (message,) = told()
        assert message.startswith("encoder has been the bottleneck for 3 seconds, ")
        assert "epd_engine_queued_media_tokens" in message
        assert "with 2 replicas" in message
        assert "pd " in message


SLEEPING = {"autoscaling": {"minReplicas": 0, "maxReplicas": 3}}


def test_where_the_api_server_does_not_admit_none_that_is_said(
    world: World, start_operator: StartOperator
) -> None:
    start_operator()
    world.create(spec=spec(roles={"encoder": SLEEPING, "pd": {"replicas": 1}}))
    condition = world.await_condition("Degraded", "ApplyFailed")
    assert "spec.minReplicas" in condition["message"]
    assert world.replicas("demo-encoder") == 1


@pytest.fixture
def from_none(control_plane: Cluster) -> None:
    """An API server that admits autoscalers which go down to 0, from here on."""
    control_plane.restart_apiserver(["--feature-gates=HPAScaleToZero=true"])


@pytest.mark.usefixtures("from_none")
def test_encoders_end_when_nobody_asks_about_pictures_and_come_back(
    installed: Installed, world: World, start_operator: StartOperator, tmp_path: Any
) -> None:
    with adapting(installed, tmp_path, *QUICK), fleet(world, "encoder", "pd", "proxy") as where:
        start_operator()
        world.create(spec=spec(roles={"encoder": SLEEPING, "pd": {"replicas": 1}}))
        settle(where, "encoder", 0)
        world.await_condition("EncoderReady", "ScaledToZero")
        where.forget()
        where.pictures = 1.0
        settle(where, "encoder", 1)
        assert where.seen("encoder") == {0, 1}
        where.pictures = 0.0
        settle(where, "encoder", 0)
        assert where.seen("pd") == {1}
