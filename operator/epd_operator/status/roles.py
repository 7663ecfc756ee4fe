"""The state of a role, or of the proxy: its Deployment and its pods."""

from collections.abc import Sequence

from ..api.status import RoleStatus, summary_of
from ..apply.rollout import Held
from .parts import SCALED_TO_ZERO, Object, PartState, Problem, blocked, waiting
from .pods import first_problem, is_current

ROLLOUT_STOPPED = "RolloutStopped"


def role_state(deployment: Object | None, pods: Sequence[Object], selector: str) -> PartState:
    """The state of what a Deployment runs; None where there is none.

    Ready means all wanted replicas are ready and are of the current spec.
    """
    counts = _counts(deployment, selector)
    if deployment is None:
        return waiting("Creating", "the Deployment is not there yet", counts)
    status = deployment.get("status", {})
    if counts.desired_replicas == 0:
        return waiting(SCALED_TO_ZERO, "it has 0 replicas, so nothing answers", counts)
    problem = first_problem(pods) or _deployment_problem(status)
    if problem is not None:
        return blocked(problem, counts)
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return waiting("RollingOut", "the change is about to be rolled out", counts)
    wanted, ready = counts.desired_replicas, counts.ready_replicas
    updated = status.get("updatedReplicas", 0)
    if updated < wanted or counts.replicas > updated:
        return waiting("RollingOut", f"{updated} of {wanted} replicas are of the current spec", counts)
    if counts.replicas > wanted:
        return waiting("RollingOut", f"{counts.replicas} replicas, {wanted} wanted", counts)
    if min(ready, status.get("availableReplicas", 0)) < wanted:
        ending = sum(not is_current(pod) for pod in pods)
        words = f", {ending} ending" if ending else ""
        return waiting("Starting", f"{ready} of {wanted} replicas are ready{words}", counts)
    return PartState(True, "AllReady", f"{ready} of {wanted} replicas are ready", counts=counts)


def held_back(state: PartState, held: Held | None) -> PartState:
    """The state of a role whose change may have to wait. What is wrong with it as it is comes first."""
    if held is None or state.is_problem:
        return state
    if held.stopped:
        words = (
            f"it stays as it was: {held.behind} comes first, and its rollout has stopped; mend the spec, or "
            "apply the one before"
        )
        return blocked(Problem(ROLLOUT_STOPPED, words), state.counts)
    return waiting("RollingOut", f"it stays as it is until {held.behind} is rolled out", state.counts)


def _counts(deployment: Object | None, selector: str) -> RoleStatus:
    found = deployment or {"spec": {"replicas": 0}}
    status = found.get("status", {})
    desired, ready = found["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    return RoleStatus.model_validate(
        {
            "replicas": status.get("replicas", 0),
            "readyReplicas": ready,
            "desiredReplicas": desired,
            "summary": summary_of(ready, desired),
            "selector": selector,
        }
    )


def _deployment_problem(status: Object) -> Problem | None:
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    failure = conditions.get("ReplicaFailure", {})
    if failure.get("status") == "True":
        return Problem("PodsRefused", failure.get("message", "pods cannot be made"))
    progressing = conditions.get("Progressing", {})
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        return Problem("StartupTimeout", "no further replica became ready within startupTimeout")
    return None
