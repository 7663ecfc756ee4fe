"""The status says what the children do, in words a person can act on."""

from collections import Counter

from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import PLURAL, World, ready_status, spec, volume

PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}
CRASHED = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"},
}


def _container(state: dict[str, object], **more: object) -> dict[str, object]:
    status = {"name": "engine", "image": "localhost/epd-engine:test", "imageID": "", "ready": False}
    return {**status, "restartCount": 3, "state": state, **more}


def _broken(container: dict[str, object]) -> dict[str, object]:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
    ]
    return {"phase": "Pending", "conditions": conditions, "containerStatuses": [container]}


def test_without_a_node_the_scheduler_and_the_claim_are_quoted(
    world: World, shared_operator: OperatorProcess
) -> None:
    world.create()
    encoder = world.await_condition("EncoderReady", "Unschedulable")
    assert "nodes" in encoder["message"]
    assert world.await_condition("Degraded", "Unschedulable")["status"] == "True"
    store = world.await_condition("StoreReady", "ClaimPending")
    assert "10Gi, ReadWriteMany" in store["message"]
    assert world.conditions()["Ready"]["status"] == "False"


def test_ready_follows_every_part(world: World, shared_operator: OperatorProcess) -> None:
    with volume(world, "demo-store"):
        world.create()
        world.make_ready("demo-encoder", "demo-pd", "demo-proxy")
        ready = world.await_condition("Ready", "Serving")
        assert ready["status"] == "True"
        resource = world.get(PLURAL, "demo")
        assert resource is not None
        roles = resource["status"]["roles"]
        assert roles["encoder"]["summary"] == "2/2"
        assert roles["language"] == "1/1"
        selector = roles["encoder"]["selector"]
        assert len(world.listed("pods", labelSelector=selector)) == 2

        # One pod of one role fails: not ready, and it is said which and why.
        pod = world.pods("demo-encoder")[0]
        ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "no such model"}}
        world.pod_status(pod, _broken(_container(CRASHED, lastState=ended)))
        encoder = world.await_condition("EncoderReady", "CrashLoop")
        assert f"pod {pod}: container engine ended with exit code 3: no such model" in encoder["message"]
        ready = world.await_condition("Ready", "CrashLoop")
        assert ready["status"] == "False"

        # It recovers, and so does the status.
        world.pod_status(pod, {**ready_status(), "containerStatuses": None})
        world.await_condition("Ready", "Serving")

        # A change is not ready before its pods are.
        changed = world.change({"roles": {"pd": {"env": [{"name": "X", "value": "1"}]}}})
        generation = changed["metadata"]["generation"]
        world.eventually(lambda: world.conditions()["Ready"]["observedGeneration"] == generation)
        world.eventually(lambda: world.conditions()["PDReady"]["status"] == "False", world.conditions)
        assert world.conditions()["Ready"]["status"] == "False"


def test_prefill_and_decode_are_followed_each(world: World, shared_operator: OperatorProcess) -> None:
    roles = {"encoder": {"replicas": 1}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    with volume(world, "demo-store"):
        world.create(spec=spec(roles=roles))
        world.make_ready("demo-encoder", "demo-prefill", "demo-proxy")
        world.await_condition("PrefillReady", "AllReady")
        assert world.conditions()["Ready"]["status"] == "False"
        world.make_ready("demo-decode")
        world.await_condition("Ready", "Serving")
        resource = world.get(PLURAL, "demo")
        assert resource is not None
        assert resource["status"]["roles"]["language"] == "P 1/1 D 2/2"
        assert world.conditions()["DecodeReady"]["status"] == "True"


def test_news_is_told_once(world: World, shared_operator: OperatorProcess) -> None:
    with volume(world, "demo-store"):
        world.create()
        world.make_ready("demo-encoder", "demo-pd", "demo-proxy")
        world.await_condition("Ready", "Serving")
        (pod,) = world.pods("demo-pd")
        for _ in range(2):
            world.pod_status(pod, _broken(_container(PULL)))
            condition = world.await_condition("PDReady", "ImagePullFailed")
            assert "cannot get image localhost/epd-engine:test" in condition["message"]
            world.pod_status(pod, {**ready_status(), "containerStatuses": None})
            world.await_condition("PDReady", "AllReady")

        def told() -> Counter[str]:
            found = world.listed("events", fieldSelector="involvedObject.kind=EPDDeployment")
            return Counter({one["reason"]: 0 for one in found}) + Counter(one["reason"] for one in found)

        def counts() -> list[int]:
            found = world.listed("events", fieldSelector="involvedObject.kind=EPDDeployment")
            return [one["count"] for one in found if one["reason"] == "ImagePullFailed"]

        # One Event for the same news, which counts.
        world.eventually(lambda: counts() == [2], told)
