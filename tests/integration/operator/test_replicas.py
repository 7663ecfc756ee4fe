"""Who says how many replicas there are, and that nobody else's number is ever undone."""

from collections.abc import Callable

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World, spec

StartOperator = Callable[..., OperatorProcess]
ENCODER = "demo-encoder"


def _after_a_look(world: World, operator: OperatorProcess) -> int | None:
    """The encoder's replicas after the operator has looked at the resource a few times more."""
    ticks = operator.ticks()
    world.eventually(lambda: operator.ticks() >= ticks + 3)
    return world.replicas(ENCODER)


def test_replicas_that_are_set_are_kept(world: World, start_operator: StartOperator) -> None:
    start_operator()
    world.create()
    world.await_settled()
    world.scale(ENCODER, 5)
    world.eventually(lambda: world.replicas(ENCODER) == 2)


def test_giving_replicas_up_keeps_them_and_frees_them(world: World, start_operator: StartOperator) -> None:
    operator = start_operator("--tick=0.5")
    world.create(spec=spec(roles={"encoder": {"replicas": 3}, "pd": {}}))
    world.await_settled()
    operator.stop()

    # Given up while nobody looks: the next operator must not let the field fall back to its default.
    world.change({"roles": {"encoder": {"replicas": None}}})
    operator = start_operator("--tick=0.5")
    assert _after_a_look(world, operator) == 3

    # Somebody scales: that sticks, also over a restart and a change of another field.
    world.scale(ENCODER, 5)
    assert _after_a_look(world, operator) == 5
    operator.stop()
    operator = start_operator("--tick=0.5")
    world.change({"roles": {"encoder": {"extraArgs": ["--max-num-seqs", "4"]}}})

    def rolled_out() -> bool:
        found = world.get("deployments", ENCODER)
        assert found is not None
        return "--max-num-seqs" in found["spec"]["template"]["spec"]["containers"][0]["args"]

    world.eventually(rolled_out)
    assert _after_a_look(world, operator) == 5

    # Taken back, it is the resource's again; and given up again, it stays again.
    world.change({"roles": {"encoder": {"replicas": 2}}})
    world.eventually(lambda: world.replicas(ENCODER) == 2)
    world.scale(ENCODER, 4)
    world.eventually(lambda: world.replicas(ENCODER) == 2)
    world.change({"roles": {"encoder": {"replicas": None}}})
    assert _after_a_look(world, operator) == 2
    world.scale(ENCODER, 1)
    assert _after_a_look(world, operator) == 1


def test_an_autoscaler_takes_over_from_the_live_value(world: World, start_operator: StartOperator) -> None:
    operator = start_operator("--tick=0.5")
    world.create(spec=spec(roles={"encoder": {"replicas": 3}, "pd": {}}))
    world.await_settled()
    world.change(
        {"roles": {"encoder": {"replicas": None, "autoscaling": {"minReplicas": 2, "maxReplicas": 6}}}}
    )
    world.eventually(lambda: world.get("horizontalpodautoscalers", ENCODER))
    assert _after_a_look(world, operator) == 3
    # What the autoscaler's controller does when load rises.
    world.scale(ENCODER, 6)
    assert _after_a_look(world, operator) == 6
    operator.stop()
    operator = start_operator("--tick=0.5")
    assert _after_a_look(world, operator) == 6


def test_replicas_never_set_are_anybodys(world: World, start_operator: StartOperator) -> None:
    operator = start_operator("--tick=0.5")
    world.create(spec=spec(roles={"encoder": {}, "pd": {}}))
    world.await_settled()
    assert world.replicas(ENCODER) == 1
    world.scale(ENCODER, 4)
    assert _after_a_look(world, operator) == 4
    world.merge("deployments", ENCODER, {"spec": {"replicas": 0}})
    assert _after_a_look(world, operator) == 0
    world.await_condition("EncoderReady", "ScaledToZero")
