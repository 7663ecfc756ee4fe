"""The cache, the queue, health, and what a request is."""

import asyncio
from typing import Any

import pytest

from epd_operator.apply.kinds import DEPLOYMENT, POD, RESOURCE
from epd_operator.apply.plan import Ref
from epd_operator.handlers.access import describe
from epd_operator.handlers.cache import Cache, Key
from epd_operator.handlers.health import Health
from epd_operator.handlers.queue import WorkQueue
from epd_operator.handlers.reading import RefusedError, read

STATUS_PATCH = ("patch", "epddeployments/status")
KEY = Key("n", "demo")
OTHER = Key("n", "other")


def _object(
    name: str, version: int, *, of: str = "demo", uid: str = "", namespace: str = "n"
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid or name,
        "resourceVersion": str(version),
        "labels": {"app.kubernetes.io/instance": of},
        "managedFields": [
            {"manager": "kubelet", "operation": "Update"},
            {"manager": "epd-operator", "operation": "Apply"},
        ],
    }
    return {"metadata": metadata, "spec": {"version": version}}


def test_the_cache_knows_what_is_new() -> None:
    cache = Cache()
    assert cache.put(DEPLOYMENT, _object("a", 5)) == KEY
    assert cache.put(DEPLOYMENT, _object("a", 5)) is None
    assert cache.put(DEPLOYMENT, _object("a", 4)) is None
    assert cache.put(DEPLOYMENT, _object("a", 6)) == KEY
    (found,) = cache.children(KEY).values()
    assert found["spec"]["version"] == 6
    assert (found["apiVersion"], found["kind"]) == ("apps/v1", "Deployment")
    assert [one["manager"] for one in found["metadata"]["managedFields"]] == ["epd-operator"]
    cache.put(POD, _object("p", 1))
    assert [one["metadata"]["name"] for one in cache.of_kind(KEY, POD)] == ["p"]
    assert cache.of_kind(OTHER, POD) == []


def test_a_late_word_about_a_former_object_is_ignored() -> None:
    cache = Cache()
    cache.put(DEPLOYMENT, _object("a", 9, uid="new"))
    assert cache.remove(DEPLOYMENT, _object("a", 8, uid="old")) is None
    assert cache.children(KEY)
    assert cache.remove(DEPLOYMENT, _object("a", 10, uid="new")) == KEY
    assert cache.children(KEY) == {}
    assert cache.remove(DEPLOYMENT, _object("a", 10, uid="new")) is None


def test_an_object_that_is_another_resources_now_leaves_the_first() -> None:
    cache = Cache()
    cache.put(DEPLOYMENT, _object("a", 1))
    cache.put(DEPLOYMENT, _object("a", 2, of="other"))
    assert cache.children(KEY) == {}
    assert list(cache.children(OTHER)) == [Ref("Deployment", "a")]


def test_what_is_not_in_a_list_is_gone() -> None:
    cache = Cache()
    cache.put(DEPLOYMENT, _object("a", 1))
    cache.put(DEPLOYMENT, _object("b", 1, of="other"))
    cache.put(DEPLOYMENT, _object("c", 1, namespace="elsewhere"))
    cache.put(POD, _object("a", 1))
    assert cache.retain(DEPLOYMENT, "n", {("n", "b")}) == {KEY}
    assert list(cache.children(KEY)) == [Ref("Pod", "a")]
    assert list(cache.children(Key("elsewhere", "demo"))) == [Ref("Deployment", "c")]
    assert cache.retain(DEPLOYMENT, None, set()) == {OTHER, Key("elsewhere", "demo")}


def test_resources_are_told_from_children() -> None:
    cache = Cache()
    assert cache.put(RESOURCE, _object("demo", 1)) == KEY
    cache.put(DEPLOYMENT, _object("demo", 1))
    assert list(cache.resources()) == [KEY]
    resource = cache.resource(KEY)
    assert resource is not None
    assert "managedFields" not in resource["metadata"]
    assert cache.resource(OTHER) is None


async def _next(queue: WorkQueue) -> Key:
    return await asyncio.wait_for(queue.get(), 30)


async def test_a_key_waits_once_however_often_it_is_added() -> None:
    queue = WorkQueue()
    for key in (KEY, KEY, OTHER, KEY):
        queue.add(key)
    assert len(queue) == 2
    assert [await _next(queue), await _next(queue)] == [KEY, OTHER]
    assert len(queue) == 0


async def test_a_key_is_never_worked_on_twice_at_once_but_comes_again() -> None:
    queue = WorkQueue()
    queue.add(KEY)
    await _next(queue)
    queue.add(KEY)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(queue.get(), 0.05)
    queue.done(KEY)
    assert await _next(queue) == KEY


async def test_a_failed_key_comes_again_by_itself() -> None:
    queue = WorkQueue()
    queue.add(KEY)
    await _next(queue)
    queue.failed(KEY)
    assert len(queue) == 0
    assert await _next(queue) == KEY


def test_health_knows_what_has_stalled() -> None:
    times = {"now": 0.0}
    health = Health(30, lambda: times["now"])
    assert health.unready() == ["the API server was not reached yet, or lacks the resource definition"]
    health.expect(["/a", "/b"])
    assert health.stalled() == []
    assert len(health.unready()) == 2
    health.listed |= {"/a", "/b"}
    assert health.unready() == []
    health.begin("n/demo")
    times["now"] = 31
    health.watched["/a"] = 31
    assert health.stalled() == ["not watching /b for 31 s", "reconciling n/demo for 31 s"]
    health.end("n/demo")
    health.watched["/b"] = 31
    assert health.stalled() == []


@pytest.mark.parametrize(
    ("method", "path", "watch", "expected"),
    [
        ("GET", "/api/v1/pods", False, ("list", "pods")),
        ("GET", "/api/v1/pods", True, ("watch", "pods")),
        ("GET", "/api/v1/namespaces/n/pods", True, ("watch", "pods")),
        ("GET", "/api/v1/namespaces/n/services/a", False, ("get", "services")),
        ("GET", "/apis/apps/v1/namespaces/n/deployments", False, ("list", "deployments")),
        (
            "PATCH",
            "/apis/epd.dev/v1alpha1/namespaces/n/epddeployments/a/status",
            False,
            ("patch", "epddeployments/status"),
        ),
        ("POST", "/api/v1/namespaces/n/events", False, ("create", "events")),
        ("PUT", "/apis/coordination.k8s.io/v1/namespaces/n/leases/a", False, ("update", "leases")),
        ("DELETE", "/api/v1/namespaces/n/services/a", False, ("delete", "services")),
        ("GET", "/api/v1/namespaces/n", False, ("get", "namespaces")),
        ("GET", "/apis", False, ("get", "")),
        ("GET", "/apis/epd.dev/v1alpha1", False, ("get", "")),
        ("GET", "/version", False, ("get", "")),
    ],
)
def test_what_a_request_is(method: str, path: str, watch: bool, expected: tuple[str, str]) -> None:
    assert describe(method, path, watch=watch) == expected


SPEC = {"model": {"source": "/m"}, "roles": {"encoder": {}, "pd": {}}}
SPLIT = {"roles": {"encoder": {}, "prefill": {}, "decode": {}}}


def _resource(spec: Any, name: str = "demo") -> dict[str, Any]:
    return {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": name, "namespace": "n", "uid": "u", "generation": 1, "selfLink": "/old"},
        "spec": spec,
        "status": {"what": "ever"},
    }


def test_a_resource_is_read_whatever_else_the_api_server_keeps_with_it() -> None:
    assert read(_resource(SPEC), {}).metadata.uid == "u"


@pytest.mark.parametrize(
    ("resource", "reason", "line"),
    [
        (_resource({"model": {"source": "/m"}}), "InvalidSpec", "spec.roles: is required"),
        (_resource(None), "InvalidSpec", "spec: must be a mapping"),
        (_resource(SPEC, "a.b"), "InvalidSpec", "metadata.name: must match"),
        (
            _resource(SPEC | {"ecStore": {"sharedStorage": {"existingClaim": "demo-store"}}}),
            "InvalidSpec",
            "spec.ecStore.sharedStorage.existingClaim: demo-store is the name of the claim that the operator",
        ),
    ],
)
def test_a_resource_that_is_refused_says_why(resource: dict[str, Any], reason: str, line: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(resource, {})
    assert caught.value.reason == reason
    assert any(line in one for one in caught.value.lines)


@pytest.mark.parametrize(
    ("kv", "kind"),
    [
        ({}, "sharedStorage"),
        ({"kvTransfer": {}}, "sharedStorage"),
        ({"kvTransfer": {"type": "sharedStorage"}}, "sharedStorage"),
        ({"kvTransfer": {"type": "nixl"}}, "nixl"),
        ({"ecStore": {"sharedMemory": {}}}, "nixl"),
    ],
)
def test_prefill_and_decode_are_carried_out(kv: dict[str, Any], kind: str) -> None:
    assert read(_resource(SPEC | SPLIT | kv), {}).spec.kv_transfer_type == kind


@pytest.mark.parametrize("store", [{"sharedMemory": {}}, {"sharedMemory": {}, "sharedStorage": {}}])
def test_memory_is_carried_out(store: dict[str, Any]) -> None:
    read(_resource(SPEC | {"ecStore": store}), {})


def test_a_claim_on_the_cluster_remembers_what_was_wanted() -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "20Gi"}}}
    children = {Ref("PersistentVolumeClaim", "demo-store"): {"spec": spec}}
    with pytest.raises(RefusedError, match="may only grow, not from 20Gi to 10Gi"):
        read(_resource(SPEC), children)
