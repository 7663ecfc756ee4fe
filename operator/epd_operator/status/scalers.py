"""Pure: who else writes a Deployment's replicas."""

from collections.abc import Iterable
from dataclasses import replace

from ..api import Role, Workload
from .parts import Object, PartState

TWO_SCALERS = "TwoScalers"


def contested(state: PartState, workload: Workload, deployment: str, others: Iterable[Object]) -> PartState:
    """The state of a part, given the autoscalers of its namespace that are not ours.

    Two that write one number undo each other's work. What runs goes on; but somebody must choose.
    """
    foreign = [one for one in others if _targets(one, deployment) and not _is_kedas_for_us(one, deployment)]
    names = [f"HorizontalPodAutoscaler {one['metadata']['name']}" for one in foreign]
    ours = _ours(workload)
    if ours is not None:
        names.insert(0, ours)
    if len(names) < 2:
        return state
    words = f"{' and '.join(names)} both set the replicas of {deployment}: remove all but one"
    if state.ready:
        return replace(state, reason=TWO_SCALERS, message=f"{state.message}; {words}", is_problem=True)
    return replace(state, message=f"{state.message}; {words}", is_problem=True)


def _ours(workload: Workload) -> str | None:
    if workload.replicas is not None:
        return "`replicas`"
    return "`autoscaling`" if isinstance(workload, Role) and workload.autoscaling is not None else None


def _targets(scaler: Object, deployment: str) -> bool:
    target = scaler.get("spec", {}).get("scaleTargetRef", {})
    return bool(target.get("kind") == "Deployment" and target.get("name") == deployment)


def _is_kedas_for_us(scaler: Object, deployment: str) -> bool:
    """KEDA works by an autoscaler of its own; our ScaledObject has the Deployment's name."""
    return any(
        owner.get("kind") == "ScaledObject" and owner.get("name") == deployment
        for owner in scaler["metadata"].get("ownerReferences", [])
    )
