"""At rest nothing is written, whatever was asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.cluster.paths import REPOSITORY
from tests.integration.operator.operators import OperatorProcess
from tests.integration.operator.world import World, spec

CASES = REPOSITORY / "tests" / "unit" / "operator" / "render" / "cases"
WRITES = ("create", "update", "patch", "delete")


def test_ticks_make_no_list_and_no_write(
    world: World, start_operator: Callable[..., OperatorProcess]
) -> None:
    """Ten minutes of a tick a minute, at a faster clock."""
    world.create(spec=spec(roles={"encoder": {"replicas": 1}, "pd": {"autoscaling": {"maxReplicas": 3}}}))
    # Nobody serves the metrics: the autoscaler's controller would write its complaint again and again.
    operator = start_operator("--tick=0.3")
    world.await_settled()
    world.await_stable("horizontalpodautoscalers")

    def writes() -> list[float]:
        calls = [operator.metric("epd_operator_requests_total", verb=verb) for verb in (*WRITES, "list")]
        return [*calls, operator.metric("epd_operator_requests_total", verb="get")]

    before, versions, ticks = writes(), world.versions(without="horizontalpodautoscalers"), operator.ticks()
    world.eventually(lambda: operator.ticks() >= ticks + 12)
    assert writes() == before
    assert world.versions(without="horizontalpodautoscalers") == versions


def test_a_restarted_operator_writes_nothing(
    world: World, start_operator: Callable[..., OperatorProcess]
) -> None:
    world.create()
    first = start_operator()
    world.await_settled()
    versions = world.await_stable()
    first.stop()
    second = start_operator("--tick=0.3")
    world.eventually(lambda: second.ticks() >= 3)
    assert world.versions() == versions
    assert sum(second.metric("epd_operator_requests_total", verb=verb) for verb in WRITES) == 0


def _spec_of(case: str) -> dict[str, Any]:
    """The spec of a golden case, as far as it can be carried out."""
    found: dict[str, Any] = yaml.safe_load((CASES / f"{case}.yaml").read_text())["spec"]
    found.pop("paused", None)
    # Kubernetes 1.20 takes no empty text in an entry of a list.
    for role in found["roles"].values():
        role["env"] = [one for one in role.get("env", []) if one.get("value") != ""]
    return found


@pytest.mark.parametrize("case", ["everything", "gpu", "hub-model", "autoscaled", "existing-claim"])
def test_what_the_api_server_stores_is_what_was_wanted(
    world: World, start_operator: Callable[..., OperatorProcess], case: str
) -> None:
    """Whatever it fills in or writes differently, a second look finds nothing to do."""
    world.create(spec=_spec_of(case))
    operator = start_operator("--tick=0.3")
    world.eventually(lambda: world.conditions().get("Ready"))
    world.eventually(
        lambda: operator.metric("epd_operator_reconciles_total", result="ok") >= 1, operator.tail
    )
    without = "horizontalpodautoscalers"
    world.await_stable(without)

    def writes() -> float:
        return sum(operator.metric("epd_operator_requests_total", verb=verb) for verb in WRITES)

    before, ticks = writes(), operator.ticks()
    world.eventually(lambda: operator.ticks() >= ticks + 4)
    assert writes() == before
