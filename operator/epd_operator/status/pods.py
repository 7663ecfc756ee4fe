"""What keeps a pod from being ready, in words that a person can act on."""

from collections.abc import Iterable, Iterator

from .parts import Object, Problem

_PULL = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CONFIGURATION = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


def is_current(pod: Object) -> bool:
    """Whether a pod counts: it is neither ending nor over."""
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not over and pod["metadata"].get("deletionTimestamp") is None


def first_problem(pods: Iterable[Object]) -> Problem | None:
    """The problem of the first pod, by name, that has one; how many others have one is said, too."""
    found = []
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        problem = problem_of(pod)
        if problem is not None:
            found.append((pod["metadata"]["name"], problem))
    if not found:
        return None
    (name, problem), more = found[0], len(found) - 1
    others = f" (and {more} more pod{'s' if more > 1 else ''})" if more else ""
    return Problem(problem.reason, f"pod {name}: {problem.message}{others}")


def problem_of(pod: Object) -> Problem | None:
    """What keeps a pod from being ready; None for one that is ready, ending, or merely not done yet."""
    status = pod.get("status", {})
    if not is_current(pod) or _condition(status, "Ready").get("status") == "True":
        return None
    # What has containers was scheduled, whatever else is still written there.
    for container in _containers(status):
        problem = _container_problem(container)
        if problem is not None:
            return problem
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Problem("Unschedulable", scheduled.get("message", "no node takes it"))
    return None


def _containers(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def _condition(status: Object, kind: str) -> Object:
    return next((one for one in status.get("conditions", []) if one["type"] == kind), {})


def _container_problem(container: Object) -> Problem | None:
    state = container.get("state", {})
    pending = state.get("waiting", {})
    reason, words = pending.get("reason", ""), pending.get("message", "")
    name = f"container {container['name']}"
    if reason in _PULL:
        said = f": {words}" if words else f" ({reason})"
        return Problem("ImagePullFailed", f"{name} cannot get image {container.get('image', '')}{said}")
    if reason in _CONFIGURATION:
        return Problem("ContainerNotCreated", f"{name}: {words or reason}")
    # A container that crashes is seen waiting, ended, or started again: the same is said of all three.
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if ended is None or ended.get("exitCode", 0) == 0:
        return Problem("CrashLoop", f"{name}: {words or reason}") if reason == "CrashLoopBackOff" else None
    return _crash(name, ended)


def _crash(name: str, ended: Object) -> Problem:
    if ended.get("reason") == "OOMKilled":
        return Problem("OutOfMemory", f"{name} was killed at its memory limit; raise resources.limits.memory")
    words = ended.get("message", "").strip()
    said = f": {words}" if words else f"; its log says why (kubectl logs --previous -c {name.split()[-1]})"
    return Problem("CrashLoop", f"{name} ended with exit code {ended['exitCode']}{said}")
