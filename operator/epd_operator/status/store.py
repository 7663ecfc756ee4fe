"""The state of the EC store: its claims, whether the pods that mount them can share them, and its janitor."""

from collections.abc import Iterable, Sequence

from .parts import Object, PartState, Problem, blocked, waiting
from .pods import is_current

SHARED = "ReadWriteMany"
BOUND = "Bound"
JANITOR_FAILING = "JanitorFailing"


def store_state(
    claims: Sequence[tuple[str, Object | None]], pods: Iterable[Object], janitor: PartState
) -> PartState:
    """The state of the store, whose claims are given by name; None for one that is not there.

    Without its janitor a store serves on and grows meanwhile: that needs somebody, but it is ready.
    """
    mounted = [pod for pod in pods if is_current(pod)]
    states = [_claim_state(name, claim, mounted) for name, claim in claims]
    lacking = next((state for state in states if not state.ready), None)
    if lacking is not None:
        return lacking
    words = ", ".join(state.message for state in states)
    if janitor.ready:
        return PartState(True, BOUND, words)
    words = f"{words}; nothing keeps it within its capacity, for the janitor is not ready: {janitor.message}"
    return PartState(True, JANITOR_FAILING if janitor.is_problem else BOUND, words, janitor.is_problem)


def _claim_state(name: str, claim: Object | None, pods: Sequence[Object]) -> PartState:
    if claim is None:
        return blocked(Problem("ClaimMissing", f"claim {name} does not exist"))
    phase = claim.get("status", {}).get("phase")
    if phase == "Lost":
        return blocked(Problem("ClaimLost", f"the volume of claim {name} is gone"))
    spec = claim["spec"]
    modes = spec.get("accessModes", [])
    if phase != "Bound":
        asked = spec.get("resources", {}).get("requests", {}).get("storage", "any size")
        kind = spec.get("storageClassName")
        of_class = f"storage class {kind}" if kind else "no storage class, and the cluster has no default one"
        words = f"claim {name} ({asked}, {', '.join(modes)}, {of_class}) has no volume yet"
        return waiting("ClaimPending", words)
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods if _mounts(pod, name)})
    if SHARED not in modes and len(nodes) > 1:
        return blocked(
            Problem(
                "VolumeNotShared",
                f"claim {name} is {', '.join(modes)}, but its pods are on nodes {', '.join(nodes)}; "
                f"use a claim with {SHARED}, or place all roles on one node",
            )
        )
    return PartState(True, BOUND, f"claim {name} is bound")


def _mounts(pod: Object, claim: str) -> bool:
    volumes = pod.get("spec", {}).get("volumes", [])
    return "nodeName" in pod.get("spec", {}) and any(
        volume.get("persistentVolumeClaim", {}).get("claimName") == claim for volume in volumes
    )
