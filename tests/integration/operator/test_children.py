"""Children follow the resource: made, kept as they should be, pruned, never taken from others."""

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World


def test_a_resource_gets_all_its_children_and_a_status(
    world: World, shared_operator: OperatorProcess
) -> None:
    world.create()
    world.await_condition("Ready", "Unschedulable")
    names = {
        plural: sorted(one["metadata"]["name"] for one in items) for plural, items in world.children().items()
    }
    assert names["deployments"] == ["demo-encoder", "demo-pd", "demo-proxy"]
    assert names["services"] == ["demo-encoder", "demo-pd", "demo-proxy"]
    assert names["persistentvolumeclaims"] == ["demo-store"]
    assert world.replicas("demo-encoder") == 2
