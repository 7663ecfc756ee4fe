"""The store's usage and its janitor in the status."""

from collections.abc import Callable

from tests.integration.operator.janitors import answering
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import PLURAL, World, ready_status, volume

GI = 1 << 30
LOST = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "False"}],
    "containerStatuses": [
        {
            "name": "janitor",
            "image": "x",
            "imageID": "",
            "ready": False,
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": {"exitCode": 2, "reason": "Error", "message": "no such directory"}},
        }
    ],
}


def _store(world: World) -> dict[str, object]:
    found: dict[str, object] = (world.get(PLURAL, "demo") or {}).get("status", {}).get("store", {})
    return found


def test_the_store_is_as_full_as_its_janitor_says_and_only_news_is_written(
    world: World, start_operator: Callable[..., OperatorProcess]
) -> None:
    with volume(world, "demo-store"), answering() as janitor:
        janitor.answer = {"bytes": 3 * GI, "entries": 12, "capacity": 9 * GI, "other": "things"}
        world.create()
        operator = start_operator("--usage-interval=0.2")
        world.make_ready("demo-encoder", "demo-pd", "demo-proxy")
        world.await_condition("Ready", "Serving")
        assert _store(world) == {}
        world.await_pods("demo-janitor")
        (pod,) = world.pods("demo-janitor")
        world.pod_status(pod, {**ready_status(), "podIP": janitor.address})
        told = {"usedBytes": 3 * GI, "entries": 12, "capacityBytes": 9 * GI, "summary": "3.0Gi/9.0Gi"}
        world.eventually(lambda: _store(world) == told, lambda: _store(world))
        versions = world.await_stable()

        # A little more is no news, and what cannot be is none either: nothing is written.
        for answer in (
            {"bytes": 3 * GI + 1, "entries": 13, "capacity": 9 * GI},
            {"bytes": -1},
            ["x" * 99_999],
        ):
            janitor.answer, asked = answer, janitor.asked
            world.eventually(lambda asked=asked: janitor.asked >= asked + 3)
        assert world.versions() == versions
        assert world.reason("Ready") == "Serving"
        assert operator.metric("epd_operator_usage_looks_total", result="failed") >= 2

        janitor.answer = {"bytes": 5 * GI, "entries": 20, "capacity": 9 * GI}
        world.eventually(lambda: _store(world).get("entries") == 20, lambda: _store(world))

        # It dies: that needs somebody, while everything serves on, and what was known stays.
        world.pod_status(pod, LOST)
        degraded = world.await_condition("Degraded", "JanitorFailing")
        assert degraded["status"] == "True"
        assert "exit code 2: no such directory" in degraded["message"]
        assert world.conditions()["StoreReady"]["status"] == "True"
        assert world.conditions()["Ready"]["status"] == "True"
        assert _store(world)["usedBytes"] == 5 * GI
