"""From children to conditions: a reason for each thing that goes wrong."""

from typing import Any

import pytest

from epd_operator.api import EPDDeployment
from epd_operator.api.status import Condition
from epd_operator.apply.rollout import Held
from epd_operator.status.compute import Observed, compute_status
from epd_operator.status.events import notes
from epd_operator.status.parts import PartState, Problem, blocked
from epd_operator.status.pods import first_problem, problem_of
from epd_operator.status.roles import held_back, role_state
from epd_operator.status.store import store_state
from epd_operator.status.usage import Usage

Object = dict[str, Any]
NOW, BEFORE = "2026-01-31T12:00:00Z", "2026-01-31T11:00:00Z"


def pod(name: str = "p", conditions: Object | None = None, **status: Any) -> Object:
    listed = [{"type": kind, **one} for kind, one in (conditions or {}).items()]
    labels = {"app.kubernetes.io/component": "pd"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"phase": "Pending", "conditions": listed, **status},
    }


def container(state: Object, **more: Any) -> Object:
    return {"name": "engine", "image": "img:1", "state": state, **more}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, **more: str) -> Object:
    return {"terminated": {"exitCode": code, **more}}


BACK_OFF = waiting("CrashLoopBackOff")
READY = {"Ready": {"status": "True"}}
UNSCHEDULABLE = {
    "PodScheduled": {"status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no gpu"}
}


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (pod(conditions=UNSCHEDULABLE), "Unschedulable", "0/1 nodes: no gpu"),
        (
            pod(containerStatuses=[container(waiting("ErrImagePull", "not found"))]),
            "ImagePullFailed",
            "container engine cannot get image img:1: not found",
        ),
        (
            pod(containerStatuses=[container(waiting("ErrImageNeverPull"))]),
            "ImagePullFailed",
            "container engine cannot get image img:1 (ErrImageNeverPull)",
        ),
        (
            pod(containerStatuses=[container(waiting("CreateContainerConfigError", 'secret "t" not found'))]),
            "ContainerNotCreated",
            'container engine: secret "t" not found',
        ),
        (
            pod(
                containerStatuses=[
                    container(waiting("CrashLoopBackOff"), lastState=ended(2, message="bad flag"))
                ]
            ),
            "CrashLoop",
            "container engine ended with exit code 2: bad flag",
        ),
        (
            pod(containerStatuses=[container(ended(1))]),
            "CrashLoop",
            "container engine ended with exit code 1; its log says why (kubectl logs --previous -c engine)",
        ),
        (
            pod(containerStatuses=[container({"running": {}}, lastState=ended(1, message="x"))]),
            "CrashLoop",
            "container engine ended with exit code 1: x",
        ),
        (
            pod(
                containerStatuses=[
                    container(waiting("CrashLoopBackOff"), lastState=ended(137, reason="OOMKilled"))
                ]
            ),
            "OutOfMemory",
            "container engine was killed at its memory limit; raise resources.limits.memory",
        ),
        (
            pod(initContainerStatuses=[container(waiting("ErrImagePull", "denied"))]),
            "ImagePullFailed",
            "container engine cannot get image img:1: denied",
        ),
        (
            pod(containerStatuses=[container(waiting("CrashLoopBackOff", "back-off"), lastState=ended(0))]),
            "CrashLoop",
            "container engine: back-off",
        ),
    ],
)
def test_what_keeps_a_pod_from_being_ready(found: Object, reason: str, words: str) -> None:
    assert problem_of(found) == Problem(reason, words)


@pytest.mark.parametrize(
    "found",
    [
        pod(),
        pod(containerStatuses=[container(waiting("ContainerCreating"))]),
        pod(containerStatuses=[container({"running": {}})]),
        pod(conditions=READY, containerStatuses=[container({"running": {}}, lastState=ended(1))]),
        pod(conditions=UNSCHEDULABLE) | {"metadata": {"name": "p", "deletionTimestamp": "now"}},
        pod(phase="Failed", containerStatuses=[container(ended(1))]),
    ],
    ids=["new", "being made", "starting", "ready after a crash", "ending", "evicted"],
)
def test_what_is_no_problem_of_a_pod(found: Object) -> None:
    assert problem_of(found) is None


def test_the_first_pod_speaks_for_the_others() -> None:
    pods = [pod("b", UNSCHEDULABLE), pod("a", UNSCHEDULABLE), pod("c", READY)]
    problem = first_problem(pods)
    assert problem is not None
    assert problem.message == "pod a: 0/1 nodes: no gpu (and 1 more pod)"


def workload(component: str = "pd", replicas: int = 2, **status: Any) -> Object:
    counts = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2}
    return {
        "metadata": {"generation": 3, "labels": {"app.kubernetes.io/component": component}},
        "spec": {"replicas": replicas},
        "status": {"observedGeneration": 3, **counts, **status},
    }


def _failure(message: str) -> list[Object]:
    return [{"type": "ReplicaFailure", "status": "True", "message": message}]


@pytest.mark.parametrize(
    ("deployment", "pods", "reason", "problem"),
    [
        (None, [], "Creating", False),
        (workload(), [], "AllReady", False),
        (workload(observedGeneration=2), [], "RollingOut", False),
        (workload(updatedReplicas=1), [], "RollingOut", False),
        (workload(replicas=1), [], "RollingOut", False),
        (workload(readyReplicas=1), [], "Starting", False),
        (workload(availableReplicas=0), [], "Starting", False),
        (workload(replicas=0), [], "ScaledToZero", False),
        (workload(), [pod(conditions=UNSCHEDULABLE)], "Unschedulable", True),
        (workload(conditions=_failure("exceeded quota")), [], "PodsRefused", True),
        (
            workload(conditions=[{"type": "Progressing", "reason": "ProgressDeadlineExceeded"}]),
            [],
            "StartupTimeout",
            True,
        ),
    ],
)
def test_the_state_of_a_role(
    deployment: Object | None, pods: list[Object], reason: str, problem: bool
) -> None:
    state = role_state(deployment, pods, "a=b")
    assert (state.reason, state.is_problem, state.ready) == (reason, problem, reason == "AllReady")
    assert state.counts is not None
    assert state.counts.selector == "a=b"


def claim(phase: str = "Bound", modes: str = "ReadWriteMany", **spec: Any) -> Object:
    requests = {"requests": {"storage": "10Gi"}}
    return {"spec": {"accessModes": [modes], "resources": requests, **spec}, "status": {"phase": phase}}


def placed(name: str, node: str) -> Object:
    found = pod(name)
    found["spec"] = {"nodeName": node, "volumes": [{"persistentVolumeClaim": {"claimName": "s"}}]}
    return found


GOOD_JANITOR = PartState(True, "AllReady", "1 of 1 replicas are ready")


@pytest.mark.parametrize(
    ("found", "pods", "reason", "words"),
    [
        (claim(), [placed("a", "1"), placed("b", "2")], "Bound", "claim s is bound"),
        (None, [], "ClaimMissing", "claim s does not exist"),
        (claim("Lost"), [], "ClaimLost", "the volume of claim s is gone"),
        (
            claim("Pending", storageClassName="nfs"),
            [],
            "ClaimPending",
            "claim s (10Gi, ReadWriteMany, storage class nfs) has no volume yet",
        ),
        (claim("Pending"), [], "ClaimPending", "no storage class, and the cluster has no default one"),
        (claim(modes="ReadWriteOnce"), [placed("a", "1"), placed("b", "1")], "Bound", ""),
        (
            claim(modes="ReadWriteOnce"),
            [placed("a", "1"), placed("b", "2")],
            "VolumeNotShared",
            "claim s is ReadWriteOnce, but its pods are on nodes 1, 2; use a claim with ReadWriteMany",
        ),
    ],
)
def test_the_state_of_the_store(found: Object | None, pods: list[Object], reason: str, words: str) -> None:
    state = store_state([("s", found)], pods, GOOD_JANITOR)
    assert state.reason == reason
    assert words in state.message
    assert state.ready is (reason == "Bound")


def resource(**status: Any) -> Object:
    metadata = {"name": "demo", "namespace": "n", "uid": "u", "generation": 7}
    return {"metadata": metadata, "status": status}


DEPLOYMENT = EPDDeployment.model_validate(
    {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": "demo", "namespace": "n"},
        "spec": {"model": {"source": "/m"}, "roles": {"encoder": {}, "pd": {}}},
    }
)
WORKLOADS = [workload(name) for name in ("encoder", "pd", "proxy")]
JANITOR = workload("janitor")


def _status(**observed: Any) -> tuple[Object, dict[str, Object]]:
    parts = {
        "resource": resource(),
        "deployment": DEPLOYMENT,
        "deployments": [*WORKLOADS, JANITOR],
        "claims": {"demo-store": claim()},
        **observed,
    }
    status = compute_status(Observed(**parts), NOW)
    return status, {one["type"]: one for one in status["conditions"]}


def test_everything_ready() -> None:
    status, conditions = _status()
    assert {kind: one["status"] for kind, one in conditions.items()} == {
        "Ready": "True",
        "Progressing": "False",
        "Degraded": "False",
        "StoreReady": "True",
        "EncoderReady": "True",
        "PDReady": "True",
        "ProxyReady": "True",
    }
    assert status["observedGeneration"] == 7
    assert {one["observedGeneration"] for one in conditions.values()} == {7}
    assert status["endpoint"] == "http://demo-proxy.n.svc:8000"
    assert status["roles"]["encoder"]["summary"] == "2/2"
    assert status["roles"]["language"] == "2/2"


def test_prefill_and_decode_have_a_condition_and_counts_each() -> None:
    split = DEPLOYMENT.model_dump(by_alias=True, exclude_none=True)
    split["spec"]["roles"] = {"encoder": {}, "prefill": {}, "decode": {}}
    workloads = [workload(name) for name in ("encoder", "prefill", "proxy", "janitor")]
    status, conditions = _status(deployment=EPDDeployment.model_validate(split), deployments=workloads)
    assert "PDReady" not in conditions
    assert conditions["PrefillReady"]["status"] == "True"
    assert conditions["DecodeReady"]["status"] == conditions["Ready"]["status"] == "False"
    assert "decode:" in conditions["Ready"]["message"]
    assert status["roles"]["language"] == "P 2/2 D 0/0"
    workloads.append(workload("decode"))
    status, conditions = _status(deployment=EPDDeployment.model_validate(split), deployments=workloads)
    assert conditions["Ready"]["status"] == "True"
    assert status["roles"]["language"] == "P 2/2 D 2/2"
    assert status["roles"]["decode"]["selector"].startswith("app.kubernetes.io/component=decode,")


@pytest.mark.parametrize(
    ("stopped", "reason", "degraded"), [(False, "RollingOut", "False"), (True, "RolloutStopped", "True")]
)
def test_a_role_whose_change_waits_is_not_ready_and_names_whom_it_waits_for(
    stopped: bool, reason: str, degraded: str
) -> None:
    _, conditions = _status(held={"encoder": Held("pd", stopped)})
    encoder = conditions["EncoderReady"]
    assert (encoder["status"], encoder["reason"]) == ("False", reason)
    assert "pd" in encoder["message"]
    assert (conditions["Ready"]["status"], conditions["Degraded"]["status"]) == ("False", degraded)


def test_what_is_wrong_with_a_role_comes_before_what_it_waits_for() -> None:
    state = blocked(Problem("CrashLoop", "it crashes"))
    assert held_back(state, Held("pd", stopped=True)) is state


def test_without_a_janitor_the_store_serves_and_somebody_is_told() -> None:
    crashing = pod(containerStatuses=[container(BACK_OFF, lastState=ended(1, message="no lease"))])
    crashing["metadata"]["labels"] = {"app.kubernetes.io/component": "janitor"}
    _, conditions = _status(deployments=[*WORKLOADS, JANITOR | {"status": {}}], pods=[crashing])
    store = conditions["StoreReady"]
    assert (store["status"], store["reason"]) == ("True", "JanitorFailing")
    assert "claim demo-store is bound; nothing keeps it within its capacity" in store["message"]
    assert "exit code 1: no lease" in store["message"]
    assert (conditions["Degraded"]["status"], conditions["Degraded"]["reason"]) == ("True", "JanitorFailing")
    assert (conditions["Ready"]["status"], conditions["Progressing"]["status"]) == ("True", "False")
    (note,) = notes([], [Condition.model_validate(store)])
    assert (note.type, note.reason) == ("Warning", "JanitorFailing")


def test_a_janitor_that_is_starting_needs_nobody() -> None:
    _, conditions = _status(deployments=WORKLOADS)
    assert (conditions["StoreReady"]["status"], conditions["StoreReady"]["reason"]) == ("True", "Bound")
    assert "the janitor is not ready: the Deployment is not there yet" in conditions["StoreReady"]["message"]
    assert conditions["Degraded"]["status"] == "False"


def test_what_the_janitor_said_is_in_the_status_and_stays_while_it_is_silent() -> None:
    told, _ = _status(usage=Usage(bytes=3 << 30, entries=12, capacity=9 << 30))
    assert told["store"] == {
        "entries": 12,
        "usedBytes": 3 << 30,
        "capacityBytes": 9 << 30,
        "summary": "3.0Gi/9.0Gi",
    }
    silent, _ = _status(resource=resource(store=told["store"]))
    assert silent["store"] == told["store"]
    assert "store" not in _status()[0]
    assert "store" not in _status(resource=resource(store={"what": "ever"}))[0]


@pytest.mark.parametrize("component", ["encoder", "pd", "proxy"])
def test_never_ready_while_a_part_is_not(component: str) -> None:
    deployments = [
        one for one in WORKLOADS if one["metadata"]["labels"]["app.kubernetes.io/component"] != component
    ]
    _, conditions = _status(deployments=deployments)
    assert conditions["Ready"]["status"] == "False"
    assert conditions["Progressing"]["status"] == "True"


def test_what_needs_somebody_is_said_before_what_needs_time() -> None:
    deployments = [workload("encoder", readyReplicas=0), WORKLOADS[1], WORKLOADS[2]]
    _, conditions = _status(deployments=deployments, pods=[pod(conditions=UNSCHEDULABLE)])
    assert conditions["Ready"]["reason"] == "Unschedulable"
    assert conditions["Degraded"]["reason"] == "Unschedulable"
    assert conditions["Progressing"]["reason"] == "Starting"
    assert conditions["Ready"]["message"].splitlines()[1].startswith("encoder: 0 of 2")


def test_a_refused_spec_is_not_ready_and_keeps_its_counts() -> None:
    problems = [Problem("InvalidSpec", "spec.roles: is required"), Problem("InvalidSpec", "spec.x: unknown")]
    before = resource(endpoint="http://old")
    status, conditions = _status(resource=before, deployment=None, problems=problems)
    assert conditions["Ready"]["reason"] == "InvalidSpec"
    assert conditions["Ready"]["message"] == "spec.roles: is required\nspec.x: unknown"
    assert conditions["Degraded"]["status"] == "True"
    assert conditions["EncoderReady"]["status"] == "True"
    assert "StoreReady" not in conditions
    assert status["roles"]["pd"]["replicas"] == 2
    assert status["endpoint"] == "http://old"


def test_children_that_cannot_be_made_are_a_problem_of_the_whole() -> None:
    _, conditions = _status(problems=[Problem("NameTaken", "Service a exists")])
    assert conditions["Ready"]["reason"] == "NameTaken"
    assert conditions["Degraded"]["message"] == "Service a exists"


def test_times_change_with_the_status_alone() -> None:
    def old(kind: str, status: str) -> Object:
        return {"type": kind, "status": status, "reason": "X", "message": "", "lastTransitionTime": BEFORE}

    _, conditions = _status(resource=resource(conditions=[old("Ready", "True"), old("PDReady", "False")]))
    assert conditions["Ready"]["lastTransitionTime"] == BEFORE
    assert conditions["PDReady"]["lastTransitionTime"] == NOW
    assert conditions["StoreReady"]["lastTransitionTime"] == NOW


def test_what_others_wrote_into_conditions_is_no_obstacle() -> None:
    _, conditions = _status(resource=resource(conditions=[{"type": "Ready", "strange": 1}]))
    assert conditions["Ready"]["lastTransitionTime"] == NOW


def test_long_messages_are_cut() -> None:
    _, conditions = _status(problems=[Problem("NameTaken", "x" * 9000)])
    assert len(conditions["Ready"]["message"]) == 4096


def _condition(kind: str, status: str, reason: str) -> Condition:
    return Condition.model_validate(
        {"type": kind, "status": status, "reason": reason, "message": "m", "lastTransitionTime": NOW}
    )


def test_news_is_what_changed_and_is_told_by_the_part_that_knows() -> None:
    before = [_condition("EncoderReady", "True", "AllReady"), _condition("PDReady", "False", "Starting")]
    after = [
        _condition("Ready", "False", "CrashLoop"),
        _condition("Progressing", "True", "Starting"),
        _condition("Degraded", "True", "CrashLoop"),
        _condition("EncoderReady", "True", "AllReady"),
        _condition("PDReady", "False", "CrashLoop"),
        _condition("StoreReady", "False", "ClaimPending"),
        _condition("ProxyReady", "False", "Creating"),
    ]
    assert [(note.type, note.reason, note.message) for note in notes(before, after)] == [
        ("Warning", "CrashLoop", "PDReady: m"),
        ("Normal", "ClaimPending", "StoreReady: m"),
    ]
    assert list(notes(after, after)) == []
    (only,) = notes([], [_condition("Ready", "False", "InvalidSpec")])
    assert only.type == "Warning"
    assert only.name({"name": "demo", "uid": "1"}) != only.name({"name": "demo", "uid": "2"})
