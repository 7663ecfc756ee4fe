"""Changes reach one kind of role after another, stop where they cannot go on, and can be taken back."""

from typing import Any

import httpx

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World, ready_status, spec, volume

ALL = ("demo-encoder", "demo-pd", "demo-proxy", "demo-janitor")
OLD, NEW = "localhost/epd-engine:test", "localhost/epd-engine:next"
STUCK = {
    "type": "Progressing",
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": "it has timed out progressing",
}


def image(world: World, deployment: str) -> str:
    found = world.get("deployments", deployment)
    assert found is not None
    name: str = found["spec"]["template"]["spec"]["containers"][0]["image"]
    return name


def roll(world: World, *deployments: str) -> None:
    """Does the work of kubelets until all pods are of the present template, and ready."""

    def rolled(deployment: str) -> bool:
        for pod in world.pods(deployment):
            try:
                world.pod_status(pod, ready_status())
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 404:  # the rollout was quicker
                    raise
        found = world.get("deployments", deployment)
        assert found is not None
        conditions = found["status"].get("conditions", [])
        is_current = found["status"].get("observedGeneration", 0) >= found["metadata"]["generation"]
        return is_current and any(one.get("reason") == "NewReplicaSetAvailable" for one in conditions)

    for deployment in deployments:
        world.eventually(lambda name=deployment: world.get("deployments", name))
        world.eventually(lambda name=deployment: rolled(name), lambda name=deployment: world.pods(name))


def generations(world: World) -> dict[str, int]:
    """Of each Deployment: it rises with any change of its spec."""
    return {one["metadata"]["name"]: one["metadata"]["generation"] for one in world.children()["deployments"]}


def stopped_at(world: World, deployment: str) -> bool:
    """Whether the operator has seen that a Deployment's progressDeadlineSeconds are over.

    Its controller stays with that once it has nothing else to tell of the rollout.
    """
    found = world.get("deployments", deployment)
    assert found is not None
    if STUCK["reason"] not in str(found["status"]["conditions"]):
        world.merge_status("deployments", deployment, {"conditions": [STUCK]})
    return world.reason("EncoderReady") == "RolloutStopped"


def serving(world: World, **changes: Any) -> None:
    world.create(spec=spec(**changes))
    roll(world, *ALL)
    world.await_condition("Ready", "Serving")


def test_a_new_engine_reaches_the_readers_first(world: World, shared_operator: OperatorProcess) -> None:
    with volume(world, "demo-store"):
        serving(world)
        world.change({"engine": {"image": NEW}})
        world.eventually(lambda: image(world, "demo-pd") == NEW)
        world.await_condition("EncoderReady", "RollingOut")
        assert "until pd is rolled out" in world.conditions()["EncoderReady"]["message"]
        assert image(world, "demo-encoder") == OLD
        roll(world, "demo-pd")
        world.eventually(lambda: image(world, "demo-encoder") == NEW)
        roll(world, *ALL)
        world.await_condition("Ready", "Serving")


def test_a_rollout_that_stops_leaves_the_rest_alone_and_can_be_taken_back(
    world: World, shared_operator: OperatorProcess
) -> None:
    with volume(world, "demo-store"):
        serving(world)
        before = generations(world)
        world.change({"engine": {"image": NEW}})
        world.eventually(lambda: image(world, "demo-pd") == NEW and len(world.pods("demo-pd")) == 2)
        world.eventually(lambda: stopped_at(world, "demo-pd"), world.conditions)
        stopped = world.conditions()["EncoderReady"]
        assert "pd comes first, and its rollout has stopped" in stopped["message"]
        assert world.conditions()["PDReady"]["status"] == "False"
        assert world.conditions()["Degraded"]["status"] == "True"
        assert generations(world)["demo-encoder"] == before["demo-encoder"]
        # The pod of before has served all the time.
        assert len(world.pods("demo-pd")) == 2

        world.change({"engine": {"image": OLD}})
        world.await_condition("Ready", "Serving")
        assert image(world, "demo-pd") == OLD
        assert generations(world)["demo-encoder"] == before["demo-encoder"]
        assert len(world.pods("demo-pd")) == 1


def test_one_roles_change_restarts_no_other(world: World, shared_operator: OperatorProcess) -> None:
    with volume(world, "demo-store"):
        serving(world)
        before = generations(world)
        pods = {name: world.pods(name) for name in ALL}
        world.change({"roles": {"encoder": {"env": [{"name": "A", "value": "1"}]}}})
        world.eventually(lambda: generations(world)["demo-encoder"] > before["demo-encoder"])
        roll(world, "demo-encoder")
        world.await_condition("Ready", "Serving")
        assert {name: world.pods(name) for name in ALL[1:]} == {name: pods[name] for name in ALL[1:]}
        assert set(world.pods("demo-encoder")).isdisjoint(pods["demo-encoder"])


def test_a_pd_serves_until_prefill_decode_and_the_proxy_are_ready(
    world: World, shared_operator: OperatorProcess
) -> None:
    with volume(world, "demo-store"):
        serving(world)
        (pd,) = world.pods("demo-pd")
        world.change({"roles": {"pd": None, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}})
        world.eventually(lambda: {"demo-prefill", "demo-decode"} <= set(world.names("deployments")))
        roll(world, "demo-prefill", "demo-decode")
        world.await_condition("DecodeReady", "AllReady")
        # The proxy's new pod is not ready yet: the one of before goes on with the PD.
        world.await_stable()
        assert world.pods("demo-pd") == [pd]
        assert {"demo-pd"} <= set(world.names("services"))
        roll(world, "demo-proxy")
        for plural in ("deployments", "services", "poddisruptionbudgets"):
            world.eventually(lambda plural=plural: "demo-pd" not in world.names(plural))
        world.await_condition("Ready", "Serving")
