"""The user's piece of a pod wins field by field, and what it does not name stays."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_operator.render import RenderError
from epd_operator.render.merge import merged

from .documents import encoder, main_container

FIELDS = st.sampled_from(["image", "cpu", "path", "a", "b"])
VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=8,
)
NAMED = st.dictionaries(
    st.sampled_from("xyz"), st.dictionaries(FIELDS, st.integers(), max_size=3), max_size=3
)


def items(named: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**fields, "name": name} for name, fields in named.items()]


@given(NAMED, NAMED)
def test_items_are_merged_by_name(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    before = deepcopy((ours, theirs))
    result = merged({"containers": items(ours)}, {"containers": items(theirs)}, "spec")["containers"]
    assert (ours, theirs) == before
    assert [one["name"] for one in result] == [*ours, *(name for name in theirs if name not in ours)]
    for one in result:
        name = one["name"]
        assert one == {**ours.get(name, {}), **theirs.get(name, {}), "name": name}


@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_merging_with_nothing_or_itself_changes_nothing(ours: dict[str, Any]) -> None:
    assert merged(ours, {}, "spec") == ours
    assert merged({}, ours, "spec") == ours
    assert merged(ours, ours, "spec") == ours


@given(st.dictionaries(FIELDS, st.integers()), st.dictionaries(FIELDS, st.integers() | st.none()))
def test_null_removes_and_all_else_wins(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    result = merged({"limits": ours}, {"limits": theirs}, "spec")["limits"]
    assert result == {field: value for field, value in {**ours, **theirs}.items() if value is not None}


def test_mounts_go_by_path_and_ports_by_number_and_protocol() -> None:
    ours = {
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "ports": [{"name": "http", "containerPort": 8000}],
    }
    theirs = {
        "volumeMounts": [{"name": "mine", "mountPath": "/tmp"}, {"name": "tmp", "mountPath": "/other"}],
        "ports": [
            {"containerPort": 8000, "protocol": "TCP", "hostPort": 80},
            {"containerPort": 8000, "protocol": "UDP"},
        ],
    }
    result = merged(ours, theirs, "spec")
    assert result["volumeMounts"] == theirs["volumeMounts"]
    assert result["ports"] == [
        {"name": "http", "containerPort": 8000, "protocol": "TCP", "hostPort": 80},
        {"containerPort": 8000, "protocol": "UDP"},
    ]


def test_alternatives_do_not_mix() -> None:
    ours = {
        "probe": {"httpGet": {"path": "/health"}, "periodSeconds": 10},
        "env": [{"name": "A", "value": "1"}],
    }
    theirs = {
        "probe": {"exec": {"command": ["true"]}},
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    result = merged(ours, theirs, "spec")
    assert result["probe"] == {"exec": {"command": ["true"]}, "periodSeconds": 10}
    assert result["env"] == theirs["env"]


def test_a_volume_is_replaced_whole_and_tolerations_are_added() -> None:
    taint = {"key": "gpu", "operator": "Exists"}
    ours = {"volumes": [{"name": "cache", "emptyDir": {}}], "tolerations": [taint]}
    theirs = {
        "volumes": [{"name": "cache", "hostPath": {"path": "/c"}}],
        "tolerations": [taint, {"key": "other"}],
    }
    assert merged(ours, theirs, "spec") == {**theirs, "tolerations": [taint, {"key": "other"}]}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"containers": {"name": "engine"}}, "containers"),
        ({"containers": ["engine"]}, "containers[0]"),
        ({"containers": [{"image": "x"}]}, "containers[0]"),
        ({"containers": [{"name": "a"}, {"name": "a"}]}, "containers[1]"),
        ({"containers": [{"name": "engine", "env": [{"value": "1"}]}]}, "containers[0].env[0]"),
        ({"containers": [{"name": "engine", "livenessProbe": "no"}]}, "containers[0].livenessProbe"),
        ({"securityContext": []}, "securityContext"),
        ({"tolerations": {}}, "tolerations"),
    ],
)
def test_a_shape_that_cannot_be_merged_is_named(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(RenderError) as caught:
        encoder(podTemplate={"spec": spec})
    assert caught.value.path == f"spec.roles.encoder.podTemplate.spec.{path}"


def test_a_label_that_selects_the_pods_is_not_the_users() -> None:
    with pytest.raises(RenderError, match=r"labels\[app\.kubernetes\.io/component\]"):
        encoder(podTemplate={"metadata": {"labels": {"app.kubernetes.io/component": "mine"}}})


def test_null_in_a_pod_template_removes_a_default() -> None:
    container = {"name": "engine", "lifecycle": None, "livenessProbe": None}
    deployment = encoder(podTemplate={"spec": {"containers": [container], "enableServiceLinks": None}})
    assert not {"lifecycle", "livenessProbe"} & set(main_container(deployment))
    assert "enableServiceLinks" not in deployment["spec"]["template"]["spec"]


def test_env_of_the_role_wins_over_ours_and_the_pod_template_over_both() -> None:
    deployment = encoder(
        env=[{"name": "HOME", "value": "/role"}, {"name": "A", "value": "role"}],
        podTemplate={
            "spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "template"}]}]}
        },
    )
    env = {one["name"]: one.get("value") for one in main_container(deployment)["env"]}
    assert (env["HOME"], env["A"]) == ("/role", "template")
