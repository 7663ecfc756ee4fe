"""Two that set one number are found."""

from dataclasses import replace
from typing import Any

import pytest

from epd_operator.api import Role
from epd_operator.apply.kinds import AUTOSCALER, child_kinds
from epd_operator.handlers.cache import Cache, Key, nobodys
from epd_operator.render import ServedVersions
from epd_operator.render.labels import labels
from epd_operator.status.parts import PartState, waiting
from epd_operator.status.scalers import contested

HPA = next(kind for kind in child_kinds(ServedVersions()) if kind.kind == AUTOSCALER)
READY = PartState(True, "AllReady", "1 of 1 replicas are ready")
FIXED = Role.model_validate({"replicas": 2})
SCALED = Role.model_validate({"autoscaling": {"maxReplicas": 2}})
FREE = Role.model_validate({})


def scaler(
    name: str, target: str = "demo-pd", owner: tuple[str, str] | None = None, kind: str = "Deployment"
) -> Any:
    owners = [] if owner is None else [{"kind": owner[0], "name": owner[1]}]
    reference = {"apiVersion": "apps/v1", "kind": kind, "name": target}
    return {"metadata": {"name": name, "ownerReferences": owners}, "spec": {"scaleTargetRef": reference}}


@pytest.mark.parametrize(
    ("role", "others", "named"),
    [
        (FIXED, [scaler("mine")], ["`replicas`", "HorizontalPodAutoscaler mine"]),
        (SCALED, [scaler("mine")], ["`autoscaling`", "HorizontalPodAutoscaler mine"]),
        (FREE, [scaler("a"), scaler("b")], ["HorizontalPodAutoscaler a", "HorizontalPodAutoscaler b"]),
        (FIXED, [scaler("keda-hpa-x", owner=("ScaledObject", "x"))], ["`replicas`", "keda-hpa-x"]),
    ],
)
def test_two_scalers_are_named_and_what_runs_stays_ready(
    role: Role, others: list[Any], named: list[str]
) -> None:
    state = contested(READY, role, "demo-pd", others)
    assert state.ready
    assert (state.reason, state.is_problem) == ("TwoScalers", True)
    assert all(name in state.message for name in named)
    starting = contested(waiting("Starting", "0 of 2"), role, "demo-pd", others)
    assert (starting.ready, starting.reason, starting.is_problem) == (False, "Starting", True)
    assert named[0] in starting.message


@pytest.mark.parametrize(
    ("role", "others"),
    [
        (FREE, [scaler("mine")]),
        (FIXED, []),
        (SCALED, []),
        (FIXED, [scaler("of another", target="demo-encoder")]),
        (FIXED, [scaler("of a set", kind="StatefulSet")]),
        (SCALED, [scaler("keda-hpa-demo-pd", owner=("ScaledObject", "demo-pd"))]),
    ],
)
def test_one_scaler_is_fine(role: Role, others: list[Any]) -> None:
    assert contested(READY, role, "demo-pd", others) == READY


def test_the_cache_keeps_others_autoscalers_apart_whatever_labels_they_have() -> None:
    cache = Cache()
    metadata = {"namespace": "n", "uid": "1", "resourceVersion": "1"}
    theirs = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/managed-by": "Helm"}
    assert cache.put(HPA, {"metadata": {**metadata, "name": "theirs", "labels": theirs}}) == nobodys("n")
    ours = {**metadata, "name": "ours", "uid": "2", "labels": labels("demo", "pd")}
    assert cache.put(HPA, {"metadata": ours}) == Key("n", "demo")
    # Whoever asks has made the kind by itself.
    same = replace(HPA)
    assert [one["metadata"]["name"] for one in cache.of_kind(nobodys("n"), same)] == ["theirs"]
    assert [ref.name for ref in cache.children(Key("n", "demo"))] == ["ours"]
