"""Whether an object is as wanted, judged by the fields that are ours."""

import copy
from typing import Any

import pytest

from epd_operator.apply.diff import as_wanted, owned_fields, owns

DESIRED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {
        "name": "a",
        "namespace": "n",
        "labels": {"x": "1"},
        "ownerReferences": [{"uid": "u", "name": "d"}],
    },
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"x": "1"}},
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "c",
                        "args": ["a", "b"],
                        "ports": [{"containerPort": 80, "name": "http"}],
                        "resources": {"limits": {"cpu": "200m", "memory": "1Gi"}},
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            }
        },
    },
}
# As the API server writes them down for DESIRED.
FIELDS: dict[str, Any] = {
    "f:metadata": {
        "f:labels": {"f:x": {}},
        "f:ownerReferences": {'k:{"uid":"u"}': {".": {}, "f:uid": {}, "f:name": {}}},
    },
    "f:spec": {
        "f:replicas": {},
        "f:selector": {},
        "f:template": {
            "f:spec": {
                "f:containers": {
                    'k:{"name":"c"}': {
                        ".": {},
                        "f:name": {},
                        "f:args": {},
                        "f:ports": {
                            'k:{"containerPort":80,"protocol":"TCP"}': {
                                ".": {},
                                "f:containerPort": {},
                                "f:name": {},
                            }
                        },
                        "f:resources": {"f:limits": {"f:cpu": {}, "f:memory": {}}},
                    }
                },
                "f:volumes": {'k:{"name":"tmp"}': {".": {}, "f:name": {}, "f:emptyDir": {}}},
            }
        },
    },
}


def _live(**spec: Any) -> dict[str, Any]:
    live = copy.deepcopy(DESIRED)
    container = live["spec"]["template"]["spec"]["containers"][0]
    container["ports"][0]["protocol"] = "TCP"
    container["terminationMessagePath"] = "/dev/termination-log"
    live["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    live["metadata"] |= {"uid": "1", "annotations": {"theirs": "1"}}
    live["metadata"]["labels"]["theirs"] = "1"
    live["spec"] |= spec
    return live


def _changed(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(manifest)
    at: Any = changed
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    for part in parents:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return changed


CONTAINER = "spec/template/spec/containers/0"


def test_defaults_and_what_others_added_make_no_difference() -> None:
    assert as_wanted(DESIRED, _live(), FIELDS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/replicas", 3),
        ("metadata/labels/x", "2"),
        ("metadata/ownerReferences", []),
        (f"{CONTAINER}/args", ["a"]),
        (f"{CONTAINER}/args", ["b", "a"]),
        (f"{CONTAINER}/ports/0/name", "other"),
        (f"{CONTAINER}/resources/limits/cpu", "300m"),
        (CONTAINER, {"name": "other"}),
        ("spec/template/spec/volumes", []),
    ],
)
def test_a_changed_value_of_ours_is_seen(path: str, value: Any) -> None:
    assert not as_wanted(DESIRED, _changed(_live(), path, value), FIELDS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/replicas", None),
        ("metadata/labels/y", "1"),
        (f"{CONTAINER}/args", ["a", "b", "c"]),
        (f"{CONTAINER}/resources/limits/memory", None),
        (f"{CONTAINER}/tty", True),
        ("spec/template/spec/volumes/0/emptyDir", {"medium": "Memory"}),
        ("metadata/ownerReferences", None),
    ],
)
def test_a_changed_wish_is_seen(path: str, value: Any) -> None:
    assert not as_wanted(_changed(DESIRED, path, value), _live(), FIELDS)


def test_a_field_that_is_no_longer_ours_is_seen_though_its_value_is_right() -> None:
    fields = copy.deepcopy(FIELDS)
    del fields["f:spec"]["f:replicas"]
    assert not as_wanted(DESIRED, _live(), fields)


def test_an_empty_map_need_not_be_written_down_as_ours() -> None:
    """As before Kubernetes 1.22."""
    fields = copy.deepcopy(FIELDS)
    del fields["f:spec"]["f:template"]["f:spec"]["f:volumes"]['k:{"name":"tmp"}']["f:emptyDir"]
    assert as_wanted(DESIRED, _live(), fields)
    assert not as_wanted(DESIRED, _changed(_live(), "spec/template/spec/volumes/0/emptyDir", None), fields)


def test_nothing_of_ours_is_seen() -> None:
    assert not as_wanted(DESIRED, _live(), {})


AMOUNTS = [("0.2", True), ("200m", True), ("0.20001", False), ("x", False)]


@pytest.mark.parametrize(("cpu", "same"), AMOUNTS)
def test_amounts_are_compared_as_amounts(cpu: str, same: bool) -> None:
    live = _changed(_live(), f"{CONTAINER}/resources/limits/cpu", cpu)
    assert as_wanted(DESIRED, live, FIELDS) is same


def test_text_is_never_compared_as_an_amount() -> None:
    live = _changed(_live(), "metadata/labels/x", "1000m")
    assert not as_wanted(DESIRED, live, FIELDS)


def test_a_set_of_values_is_compared_by_its_members() -> None:
    desired = {"metadata": {"name": "a", "finalizers": ["one"]}}
    fields = {"f:metadata": {"f:finalizers": {'v:"one"': {}}}}
    assert as_wanted(desired, {"metadata": {"finalizers": ["two", "one"]}}, fields)
    assert not as_wanted(desired, {"metadata": {"finalizers": ["two"]}}, fields)


def test_our_fields_are_those_that_we_applied_to_the_object_itself() -> None:
    def entry(manager: str, operation: str, **more: str) -> dict[str, Any]:
        return {
            "manager": manager,
            "operation": operation,
            "fieldsV1": {f"f:{manager}{operation}": {}},
            **more,
        }

    ours = entry("epd-operator", "Apply")
    others = [
        entry("epd-operator", "Update"),
        entry("kubectl", "Apply"),
        entry("epd-operator", "Apply", subresource="status"),
    ]
    assert owned_fields({"metadata": {"managedFields": [*others, ours]}}) == ours["fieldsV1"]
    assert owned_fields({"metadata": {"managedFields": others}}) == {}
    assert owned_fields({"metadata": {}}) == {}


def test_owning_a_path() -> None:
    assert owns(FIELDS, "spec", "replicas")
    assert not owns(FIELDS, "spec", "paused")
    assert not owns(FIELDS, "status", "replicas")
