"""Who scales a role changes hands on the real controllers, and the replicas never leave their band."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World, spec
from tests.integration.scaling.fleet import Fleet, fleet
from tests.support.waiting import eventually

StartOperator = Callable[..., OperatorProcess]
PATIENCE_S = 90.0

pytestmark = pytest.mark.usefixtures("adapter")


@dataclass(frozen=True)
class Step:
    """Somebody else scales from here on."""

    encoder: dict[str, Any]
    """What the resource says of the role."""
    becomes: int
    load: float = 0.0
    """In replicas that are full with it."""
    scaled_by_hand: int | None = None


HPA = {"replicas": None, "autoscaling": {"minReplicas": 2, "maxReplicas": 6}}
STEPS = {
    # Loads that lead to the most and the fewest: between them an autoscaler may swing.
    "fixed -> hpa": Step(HPA, becomes=6, load=9),
    "hpa -> fixed": Step({"replicas": 4, "autoscaling": None}, becomes=4, load=9),
    "fixed -> anybody's": Step({"replicas": None, "autoscaling": None}, becomes=4),
    "anybody's, by hand": Step({"replicas": None, "autoscaling": None}, becomes=5, scaled_by_hand=5),
    "anybody's -> hpa": Step(HPA, becomes=2, load=0.5),
    "hpa -> anybody's": Step({"replicas": None, "autoscaling": None}, becomes=2, load=9),
}


def settle(where: Fleet, role: str, wanted: int) -> None:
    """Waits until the role has so many replicas and keeps them for a while."""

    def settled() -> bool:
        last = where.replicas[role][-20:]
        return len(last) == 20 and set(last) == {wanted}

    try:
        eventually(settled, PATIENCE_S)
    except AssertionError:
        raise AssertionError(f"{role} did not become {wanted}: {where.explain(role)}") from None


def test_replicas_go_from_the_live_value_to_the_new_one_and_nowhere_else(
    world: World, start_operator: StartOperator
) -> None:
    with fleet(world, "encoder", "pd") as where:
        operator = start_operator("--tick=0.5")
        world.create(spec=spec(roles={"encoder": {"replicas": 3}, "pd": {"replicas": 2}}))
        settle(where, "encoder", 3)
        settle(where, "pd", 2)
        for name, step in STEPS.items():
            where.forget()
            before = where.now("encoder")
            # Each change comes while nobody looks; half of the operators are killed.
            operator.kill() if step.load else operator.stop()
            if step.encoder["autoscaling"]:
                where.load["encoder"] = step.load
            world.change({"roles": {"encoder": step.encoder}})
            operator = start_operator("--tick=0.5")
            wanted = bool(step.encoder["autoscaling"])
            world.eventually(lambda wanted=wanted: (_scaler(world) is not None) == wanted)
            # Without an autoscaler, load means nothing.
            where.load["encoder"] = step.load
            if step.scaled_by_hand is not None:
                world.scale("demo-encoder", step.scaled_by_hand)
            settle(where, "encoder", step.becomes)
            band = range(min(before, step.becomes), max(before, step.becomes) + 1)
            assert where.seen("encoder") <= set(band), f"{name}: {where.replicas['encoder']}"
            assert where.seen("pd") == {2}, f"{name}: another role was touched"


def _scaler(world: World) -> object:
    return world.get("horizontalpodautoscalers", "demo-encoder")


def test_each_role_follows_its_own_load(world: World, start_operator: StartOperator) -> None:
    """Pictures scale encoders only, long answers PD only, and back down after the window."""
    scaled = {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}
    with fleet(world, "encoder", "pd") as where:
        start_operator()
        world.create(spec=spec(roles={"encoder": scaled, "pd": scaled}))
        settle(where, "encoder", 1)
        where.forget()
        where.load["encoder"] = 9
        settle(where, "encoder", 3)
        assert where.seen("pd") == {1}
        where.load["encoder"] = 0.2
        settle(where, "encoder", 1)
        where.forget()
        where.load["pd"] = 9
        settle(where, "pd", 3)
        where.load["pd"] = 0.1
        settle(where, "pd", 1)
        assert where.seen("encoder") == {1}
        # Nobody but the autoscaler ever wrote the number.
        scaler = world.call("GET", world.path("horizontalpodautoscalers", "demo-pd"))
        assert scaler["spec"]["scaleTargetRef"]["name"] == "demo-pd"
