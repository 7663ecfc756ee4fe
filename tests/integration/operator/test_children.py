"""Children follow the resource: made, kept as they should be, pruned, never taken from others."""

import pytest

from tests.cluster.paths import REPOSITORY
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import CHILDREN, PLURAL, World, spec

CASES = REPOSITORY / "tests" / "unit" / "operator" / "render" / "cases"
WRITES = ("create", "update", "patch", "delete")
FOREIGN_SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "demo-proxy"},
    "spec": {"selector": {"app": "mine"}, "ports": [{"port": 80}]},
}


def test_a_resource_gets_all_its_children_and_a_status(
    world: World, shared_operator: OperatorProcess
) -> None:
    world.create()
    world.await_settled()
    names = {
        plural: sorted(one["metadata"]["name"] for one in items) for plural, items in world.children().items()
    }
    assert names == {
        "deployments": ["demo-encoder", "demo-janitor", "demo-pd", "demo-proxy"],
        "services": ["demo-encoder", "demo-pd", "demo-proxy"],
        "serviceaccounts": ["demo-engine", "demo-proxy"],
        "roles": ["demo-proxy"],
        "rolebindings": ["demo-proxy"],
        "networkpolicies": ["demo-engine", "demo-janitor", "demo-proxy"],
        "persistentvolumeclaims": ["demo-store"],
        "horizontalpodautoscalers": [],
        "poddisruptionbudgets": ["demo-encoder", "demo-pd", "demo-proxy"],
    }
    resource = world.get(PLURAL, "demo")
    assert resource is not None
    assert resource["metadata"].get("finalizers", []) == []
    assert "annotations" not in resource["metadata"]
    assert resource["status"]["endpoint"] == f"http://demo-proxy.{world.name}.svc:8000"
    assert resource["status"]["roles"]["encoder"]["desiredReplicas"] == 2
    assert {one["type"] for one in resource["status"]["conditions"]} == {
        *("Ready", "Progressing", "Degraded", "StoreReady", "EncoderReady", "PDReady", "ProxyReady")
    }


def test_drift_is_corrected_and_what_others_added_is_kept(
    world: World, shared_operator: OperatorProcess
) -> None:
    world.create()
    world.await_settled()
    container = {"name": "engine", "image": "somebody/else:1"}
    world.merge(
        "deployments",
        "demo-pd",
        {
            "metadata": {
                "labels": {"team": "blue", "app.kubernetes.io/name": "other"},
                "annotations": {"note": "mine"},
            },
            "spec": {"template": {"spec": {"containers": [container]}}},
        },
    )

    def healed() -> bool:
        found = world.get("deployments", "demo-pd")
        assert found is not None
        ours = found["spec"]["template"]["spec"]["containers"]
        return [one["image"] for one in ours] == ["localhost/epd-engine:test"] and found["metadata"][
            "labels"
        ]["app.kubernetes.io/name"] == "epd"

    world.eventually(healed, lambda: world.get("deployments", "demo-pd"))
    found = world.get("deployments", "demo-pd")
    assert found is not None
    assert found["metadata"]["labels"]["team"] == "blue"
    assert found["metadata"]["annotations"]["note"] == "mine"


@pytest.mark.parametrize("plural", ["deployments", "networkpolicies", "serviceaccounts"])
def test_a_child_that_was_deleted_is_made_again(
    world: World, shared_operator: OperatorProcess, plural: str
) -> None:
    world.create()
    world.await_settled()
    child = world.children()[plural][0]["metadata"]
    world.delete(plural, child["name"])

    def is_new() -> bool:
        found = world.get(plural, child["name"])
        return found is not None and found["metadata"]["uid"] != child["uid"]

    world.eventually(is_new)


def test_a_child_without_our_label_is_found_and_gets_it_back(
    world: World, shared_operator: OperatorProcess
) -> None:
    """Without the label the watch sees it as gone."""
    world.create()
    world.await_settled()
    label = "app.kubernetes.io/managed-by"
    before = world.merge("services", "demo-pd", {"metadata": {"labels": {label: None}}})
    world.eventually(
        lambda: (world.get("services", "demo-pd") or {})["metadata"]["labels"].get(label) == "epd-operator"
    )
    after = world.get("services", "demo-pd")
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_children_no_longer_wanted_are_pruned(world: World, shared_operator: OperatorProcess) -> None:
    world.create(spec=spec(roles={"encoder": {"autoscaling": {"maxReplicas": 3}}, "pd": {}}))
    world.eventually(lambda: world.get("horizontalpodautoscalers", "demo-encoder"))
    world.change({"roles": {"encoder": {"autoscaling": None}}})
    world.eventually(lambda: world.get("horizontalpodautoscalers", "demo-encoder") is None)


def test_an_object_of_somebody_else_is_refused_not_taken_over(
    world: World, shared_operator: OperatorProcess
) -> None:
    theirs = world.call("POST", world.path("services"), FOREIGN_SERVICE)
    world.create()
    condition = world.await_condition("Ready", "NameTaken")
    assert "Service demo-proxy exists and belongs to somebody else" in condition["message"]
    # The rest is made.
    world.eventually(lambda: world.get("deployments", "demo-encoder"))
    found = world.get("services", "demo-proxy")
    assert found is not None
    assert found["spec"] == theirs["spec"]
    assert found["metadata"].get("labels") is None
    # Once the name is free, the child is made without anybody's help.
    world.delete("services", "demo-proxy")
    world.eventually(
        lambda: "labels" in (world.get("services", "demo-proxy") or {"metadata": {}})["metadata"]
    )


def test_a_paused_resource_is_left_alone(world: World, shared_operator: OperatorProcess) -> None:
    world.create()
    world.await_settled()
    world.change({"paused": True})
    world.await_condition("Progressing", "Paused")
    world.change({"roles": {"encoder": {"replicas": 3}}})
    world.delete("services", "demo-pd")
    resource = world.get(PLURAL, "demo")
    assert resource is not None
    generation = resource["metadata"]["generation"]
    world.eventually(lambda: world.conditions()["Ready"]["observedGeneration"] == generation)
    assert world.replicas("demo-encoder") == 2
    assert world.get("services", "demo-pd") is None
    world.change({"paused": False})
    world.eventually(lambda: world.replicas("demo-encoder") == 3 and world.get("services", "demo-pd"))


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"roles": {"prefill": {}, "decode": {}}}, "InvalidSpec", "spec.roles: takes `pd`, or"),
        ({"engine": {"type": "vllm"}}, "InvalidSpec", "spec.engine.image: there is no image of vLLM"),
        # Else the claim would be pruned, with all that is in it.
        (
            {"ecStore": {"sharedStorage": {"existingClaim": "demo-store"}}},
            "InvalidSpec",
            "demo-store is the name of the claim that the operator makes",
        ),
        (
            {"ecStore": {"sharedStorage": {"claimTemplate": {"size": "1Gi"}}}},
            "InvalidSpec",
            "may only grow, not from 10Gi to 1Gi",
        ),
    ],
)
def test_a_spec_that_cannot_be_carried_out_leaves_the_children_as_they_are(
    world: World, shared_operator: OperatorProcess, change: dict[str, object], reason: str, words: str
) -> None:
    world.create()
    world.await_settled()
    before = world.await_stable()
    world.change(change)
    condition = world.await_condition("Ready", reason)
    assert words in condition["message"]
    assert condition["observedGeneration"] == 2
    after = world.versions()
    resource = f"{PLURAL}/demo"
    assert {**after, resource: ""} == {**before, resource: ""}
    assert set(world.children()) == set(CHILDREN)
