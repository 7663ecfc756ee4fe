"""In which order a change reaches the roles, and what stays until it has."""

import copy
from typing import Any

import pytest

from epd_operator.apply.plan import Ref, ref_of
from epd_operator.apply.rollout import Held, Stage, is_rolled_out, stage
from epd_operator.render import ENGINE_HASH_ANNOTATION
from tests.unit.operator.render.documents import rendered

Object = dict[str, Any]
PD: Object = {"encoder": {}, "pd": {}}
SPLIT: Object = {"encoder": {}, "prefill": {}, "decode": {}}
NEW_IMAGE: Object = {"engine": {"image": "engine:2"}}
NEW_MODEL: Object = {"model": {"source": "org/other"}}
ENCODER = Ref("Deployment", "digits-encoder")


def progress(reason: str, observed: int = 1) -> Object:
    return {"observedGeneration": observed, "conditions": [{"type": "Progressing", "reason": reason}]}


ROLLED = progress("NewReplicaSetAvailable")
ROLLING = progress("ReplicaSetUpdated")
STOPPED = progress("ProgressDeadlineExceeded")


def cluster(spec: Object | None = None, **status: Object) -> dict[Ref, Object]:
    """What is there once `spec` was carried out; `status` is that of a component's Deployment."""
    found = copy.deepcopy(rendered(spec))
    for one in found:
        one["metadata"]["generation"] = 1
        if one["kind"] == "Deployment":
            one["status"] = status.get(one["metadata"]["name"].removeprefix("digits-"), ROLLED)
    return {ref_of(one): one for one in found}


def staged(spec: Object | None, live: dict[Ref, Object]) -> Stage:
    return stage(rendered(spec), live)


def put(live: dict[Ref, Object], spec: Object, role: str, status: Object) -> None:
    """The role's change was written."""
    ref = Ref("Deployment", f"digits-{role}")
    live[ref] = cluster(spec, **{role: status})[ref]


def test_everything_is_made_at_once() -> None:
    found = staged({"roles": SPLIT}, {})
    assert found == Stage(rendered({"roles": SPLIT}), frozenset(), {})


def test_nothing_waits_at_rest_whatever_became_of_the_pods() -> None:
    assert staged(None, cluster()).held == {}
    assert staged(None, cluster(pd=STOPPED, encoder=ROLLING)).kept == frozenset()


@pytest.mark.parametrize("change", [NEW_IMAGE, NEW_MODEL], ids=["image", "model"])
@pytest.mark.parametrize("roles", [PD, SPLIT], ids=["pd", "split"])
def test_readers_come_before_writers(roles: Object, change: Object) -> None:
    live, wanted = cluster({"roles": roles}), {"roles": roles, **change}
    readers = [role for role in roles if role != "encoder"]
    for role in readers:
        found = staged(wanted, live)
        assert found.held["encoder"].stopped is False
        assert ENCODER in found.kept
        named = {ref_of(one) for one in found.desired}
        assert ENCODER not in named
        assert {Ref("Deployment", f"digits-{reader}") for reader in readers} <= named, "all readers at once"
        put(live, wanted, role, ROLLING)
    assert staged(wanted, live).held == {"encoder": Held(readers[0], stopped=False)}
    for role in readers:
        put(live, wanted, role, ROLLED)
    found = staged(wanted, live)
    assert found.held == {}
    assert ENCODER in {ref_of(one) for one in found.desired}


def test_a_rollout_that_stops_leaves_the_writers_as_they_are() -> None:
    live = cluster()
    put(live, NEW_IMAGE, "pd", STOPPED)
    found = staged(NEW_IMAGE, live)
    assert found.held == {"encoder": Held("pd", stopped=True)}
    assert ENCODER in found.kept
    # The spec of before: the encoder never changed.
    back = staged(None, live)
    assert back.held == {}
    assert live[ENCODER]["metadata"]["annotations"] == next(
        one["metadata"]["annotations"] for one in back.desired if ref_of(one) == ENCODER
    )
    # Or it becomes ready after all.
    put(live, NEW_IMAGE, "pd", ROLLED)
    assert staged(NEW_IMAGE, live).held == {}


def test_a_change_that_is_not_seen_yet_is_not_rolled_out() -> None:
    live = cluster()
    put(live, NEW_IMAGE, "pd", ROLLED | {"observedGeneration": 0})
    assert staged(NEW_IMAGE, live).held == {"encoder": Held("pd", stopped=False)}


def test_what_is_no_other_engine_waits_for_nobody() -> None:
    wanted = {"roles": {"encoder": {"env": [{"name": "A", "value": "1"}]}, "pd": {"drainTimeout": "1m"}}}
    for status in (ROLLED, ROLLING, STOPPED):
        assert staged(wanted, cluster(pd=status)).held == {}


def test_children_of_an_older_operator_are_taken_for_the_same_engine() -> None:
    live = cluster()
    for one in live.values():
        one["metadata"].get("annotations", {}).pop(ENGINE_HASH_ANNOTATION, None)
    assert staged(NEW_IMAGE, live).held == {}


def test_a_writer_waits_for_readers_that_are_yet_to_be_made() -> None:
    found = staged({"roles": SPLIT, **NEW_MODEL}, cluster())
    assert found.held == {"encoder": Held("prefill", stopped=False)}


def test_the_old_topology_stays_until_the_proxy_has_switched() -> None:
    live, wanted = cluster({"roles": PD}), {"roles": SPLIT}
    of_pd = {ref for ref in live if ref.name == "digits-pd"}
    assert {ref.kind for ref in of_pd} == {"Deployment", "Service", "PodDisruptionBudget"}
    assert staged(wanted, live).kept == of_pd
    for status in (ROLLING, STOPPED, ROLLED | {"observedGeneration": 0}):
        put(live, wanted, "proxy", status)
        assert staged(wanted, live).kept == of_pd
    put(live, wanted, "proxy", ROLLED)
    assert staged(wanted, live).kept == frozenset()


def test_a_deployment_that_says_nothing_is_not_rolled_out() -> None:
    assert not is_rolled_out({"metadata": {"generation": 1}})
