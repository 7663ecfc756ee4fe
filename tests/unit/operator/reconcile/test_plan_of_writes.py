"""Which writes bring the children to what is wanted."""

from typing import Any

import pytest

from epd_operator.apply.kinds import UnservedError, child_kinds, choose_versions
from epd_operator.apply.ownership import Owner, Ownership, ownership
from epd_operator.apply.plan import Ref, plan, ref_of
from epd_operator.render import ServedVersions

OWNER = Owner("demo", "u1")
LABELS = {"app.kubernetes.io/managed-by": "epd-operator", "app.kubernetes.io/instance": "demo"}
KINDS = {"Deployment", "Service", "PersistentVolumeClaim"}


def _reference(uid: str) -> dict[str, str]:
    return {"kind": "EPDDeployment", "name": "demo", "uid": uid}


def _manifest(kind: str = "Deployment", **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}


def _live(kind: str = "Deployment", owner: str | None = "u1", **spec: Any) -> dict[str, Any]:
    """An object that we made with just this spec."""
    live = _manifest(kind, **spec)
    fields = {"f:spec": {f"f:{name}": {} for name in spec}} if spec else {}
    entry = {"manager": "epd-operator", "operation": "Apply", "fieldsV1": fields}
    references = [_reference(owner)] if owner else []
    live["metadata"] |= {"labels": LABELS, "ownerReferences": references, "managedFields": [entry]}
    return live


def _plan(desired: list[dict[str, Any]], live: list[dict[str, Any]]) -> Any:
    return plan(desired, {ref_of(one): one for one in live}, OWNER, KINDS)


def test_nothing_is_written_when_nothing_differs() -> None:
    steps = _plan([_manifest(x=1)], [_live(x=1)])
    assert steps.is_empty
    assert steps.refused == []


def test_what_is_missing_or_differs_is_applied() -> None:
    missing, differs = _manifest("Service", x=1), _manifest(x=2)
    assert _plan([missing, differs], [_live(x=1)]).apply == [missing, differs]


def test_replicas_given_up_are_handed_over_first() -> None:
    live = _live(replicas=3, x=1)
    steps = _plan([_manifest(x=1)], [live])
    assert steps.hand_over == [live]
    assert steps.apply == [_manifest(x=1)]


def test_replicas_that_were_never_ours_are_not_handed_over() -> None:
    live = _live(x=1)
    live["spec"]["replicas"] = 5
    assert _plan([_manifest(x=1)], [live]).is_empty


@pytest.mark.parametrize(
    ("live", "deleted"),
    [
        (_live(x=1), True),
        (_live("Pod", x=1), False),
        (_live(owner="u2", x=1), False),
        (_live("PersistentVolumeClaim", owner=None, x=1), False),
        (_live(x=1) | {"metadata": _live()["metadata"] | {"deletionTimestamp": "now"}}, False),
    ],
    ids=["ours", "made by others of ours", "of another resource", "kept", "ending already"],
)
def test_only_our_own_children_are_pruned(live: dict[str, Any], deleted: bool) -> None:
    assert bool(_plan([], [live]).delete) is deleted


def test_what_is_kept_is_not_pruned() -> None:
    live = {ref_of(one): one for one in [_live(x=1)]}
    assert plan([], live, OWNER, KINDS, live).is_empty


def test_an_object_of_another_owner_is_refused() -> None:
    steps = _plan([_manifest(x=2)], [_live(owner="u2", x=1)])
    assert steps.is_empty
    assert steps.refused == ["Deployment a exists and belongs to EPDDeployment demo; delete or rename it"]


@pytest.mark.parametrize(
    ("references", "labels", "expected"),
    [
        ([_reference("u1")], {}, Ownership.OWNED),
        ([_reference("u0"), _reference("u1")], LABELS, Ownership.OWNED),
        ([], LABELS, Ownership.KEPT),
        ([], {}, Ownership.FOREIGN),
        ([], LABELS | {"app.kubernetes.io/instance": "other"}, Ownership.FOREIGN),
        ([_reference("u0")], LABELS, Ownership.FOREIGN),
    ],
    ids=["owned", "owned with another", "kept", "nobody's", "another's", "a former resource's"],
)
def test_whose_an_object_is(references: list[Any], labels: dict[str, str], expected: Ownership) -> None:
    assert ownership({"metadata": {"labels": labels, "ownerReferences": references}}, OWNER) is expected


def test_the_newest_served_version_is_taken() -> None:
    def groups(*versions: str) -> list[dict[str, Any]]:
        return [{"versions": [{"groupVersion": version} for version in versions]}]

    old = groups("autoscaling/v1", "autoscaling/v2beta2", "policy/v1beta1", "discovery.k8s.io/v1beta1")
    assert choose_versions(old) == ServedVersions(
        "autoscaling/v2beta2", "policy/v1beta1", "discovery.k8s.io/v1beta1"
    )
    new = groups("autoscaling/v2", "policy/v1", "discovery.k8s.io/v1")
    assert choose_versions([*old, *new]) == ServedVersions()
    with pytest.raises(UnservedError, match="policy/v1, policy/v1beta1"):
        choose_versions(groups("autoscaling/v2"))


def test_paths_of_kinds() -> None:
    kinds = {kind.kind: kind for kind in child_kinds(ServedVersions(policy="policy/v1beta1"))}
    assert kinds["Service"].path("n", "a") == "/api/v1/namespaces/n/services/a"
    assert kinds["Deployment"].collection(None) == "/apis/apps/v1/deployments"
    assert kinds["PodDisruptionBudget"].version == "v1beta1"
    assert Ref("Service", "a") == ref_of({"kind": "Service", "metadata": {"name": "a"}})
