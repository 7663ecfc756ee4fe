"""Deleting works without the operator: nothing waits for it."""

from collections.abc import Callable

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import PLURAL, World, spec

StartOperator = Callable[..., OperatorProcess]


def test_a_resource_deleted_while_the_operator_is_down_leaves_only_a_retained_claim(
    world: World, start_operator: StartOperator
) -> None:
    operator = start_operator()
    world.create(spec=spec(ecStore={"sharedStorage": {"retention": "Retain"}}))
    world.await_settled()
    operator.kill()
    world.delete(PLURAL, "demo")
    world.eventually(lambda: world.get(PLURAL, "demo") is None)
    world.eventually(
        lambda: sum(len(items) for items in world.children().values()) == 1, lambda: world.versions()
    )
    (claim,) = world.listed("persistentvolumeclaims")
    assert claim["metadata"]["name"] == "demo-store"

    # A resource of the same name finds its claim again.
    start_operator()
    world.create(spec=spec(ecStore={"sharedStorage": {"retention": "Retain"}}))
    world.await_settled()
    (again,) = world.listed("persistentvolumeclaims")
    assert again["metadata"]["uid"] == claim["metadata"]["uid"]
    # And with another policy it belongs to it.
    world.change({"ecStore": {"sharedStorage": {"retention": "Delete"}}})

    def has_an_owner() -> bool:
        (found,) = world.listed("persistentvolumeclaims")
        return bool(found["metadata"].get("ownerReferences"))

    world.eventually(has_an_owner)


def test_a_namespace_can_be_deleted_while_the_operator_is_down(
    world: World, start_operator: StartOperator
) -> None:
    operator = start_operator()
    world.create()
    world.await_settled()
    operator.kill()
    world.call("DELETE", f"/api/v1/namespaces/{world.name}")
    world.eventually(lambda: world.get(PLURAL, "demo") is None)
    world.eventually(lambda: not any(world.children().values()), world.versions)


def test_a_resource_made_anew_at_once_gets_its_own_children(
    world: World, start_operator: StartOperator
) -> None:
    """The old one's children stand in the way until they are collected."""
    start_operator()
    first = world.create()
    world.await_settled()
    world.delete(PLURAL, "demo")
    world.eventually(lambda: world.get(PLURAL, "demo") is None)
    second = world.create()
    assert second["metadata"]["uid"] != first["metadata"]["uid"]

    def all_its_own() -> bool:
        found = [one for items in world.children().values() for one in items]
        owners = {one["metadata"]["ownerReferences"][0]["uid"] for one in found}
        return owners == {second["metadata"]["uid"]} and world.reason("Ready") == "Unschedulable"

    world.eventually(all_its_own, world.conditions)
