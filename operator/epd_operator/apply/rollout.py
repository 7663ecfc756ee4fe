"""Pure: when a change reaches each role, and what stays until it has.

- A changed engine or model reaches the roles that run the language model first, and encoders once those are
  rolled out: a reader of this release reads what the one before wrote, not the other way round. Prefill and
  decode move together; which of their pods go with one another is said by the engines.
- A rollout that does not become ready stops there: encoders stay as they are, and go on once it has.
- A role that is no longer wanted stays until the proxy has been rolled out without it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..render import ENGINE_HASH_ANNOTATION, SPEC_HASH_ANNOTATION
from ..render.labels import COMPONENT_LABEL
from ..roles import TRAITS
from .plan import Ref, ref_of

Object = dict[str, Any]

_PROXY = "proxy"
_WRITER = "encoder"
_COMPLETE = "NewReplicaSetAvailable"
_STOPPED = "ProgressDeadlineExceeded"


@dataclass(frozen=True)
class Held:
    """A role that stays as it is for now."""

    behind: str
    """The role whose rollout comes first."""
    stopped: bool
    """Whether that one was not ready in time: no more is to be expected of it."""


@dataclass(frozen=True)
class Stage:
    """What of a wish can be carried out now."""

    desired: list[Object]
    """Manifests to be applied."""
    kept: frozenset[Ref]
    """Children that are neither to be written nor deleted."""
    held: dict[str, Held] = field(default_factory=dict)
    """Roles whose change waits."""


def stage(desired: Iterable[Object], live: Mapping[Ref, Object]) -> Stage:
    """The part of `desired` that may reach the cluster, given the children that there are."""
    manifests = list(desired)
    deployments = {_component(one): one for one in manifests if one["kind"] == "Deployment"}
    held = _held(deployments, live)
    waiting = {ref_of(deployments[role]) for role in held}
    return Stage(
        desired=[one for one in manifests if ref_of(one) not in waiting],
        kept=frozenset(waiting) | _until_the_proxy_has_switched(manifests, deployments, live),
        held=held,
    )


def is_rolled_out(deployment: Mapping[str, Any]) -> bool:
    """Whether all pods were once ready with the present template; what became of them later is no matter."""
    status = deployment.get("status", {})
    observed = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    return observed and _progress(deployment) == _COMPLETE


def _held(deployments: Mapping[str, Object], live: Mapping[Ref, Object]) -> dict[str, Held]:
    writer = deployments.get(_WRITER)
    found = None if writer is None else live.get(ref_of(writer))
    if writer is None or found is None or not _is_other_engine(writer, found):
        return {}
    for role, manifest in deployments.items():
        if role in TRAITS and role != _WRITER:
            reader = live.get(ref_of(manifest))
            if reader is None or _hash(reader) != _hash(manifest):
                return {_WRITER: Held(role, stopped=False)}
            if not is_rolled_out(reader):
                return {_WRITER: Held(role, stopped=_progress(reader) == _STOPPED)}
    return {}


def _until_the_proxy_has_switched(
    manifests: Iterable[Object], deployments: Mapping[str, Object], live: Mapping[Ref, Object]
) -> frozenset[Ref]:
    """Children of roles that are no longer wanted, while pods of the proxy may still send to them."""
    proxy = deployments.get(_PROXY)
    found = None if proxy is None else live.get(ref_of(proxy))
    if proxy is None or found is None or (_hash(found) == _hash(proxy) and is_rolled_out(found)):
        return frozenset()
    unwanted = {role for role in TRAITS if role not in deployments}
    return frozenset(ref for ref, one in live.items() if _component(one) in unwanted)


def _is_other_engine(manifest: Object, found: Object) -> bool:
    """Whether pods would change, and with them what they write. One of before there was this annotation is
    taken for the same."""
    wanted = _annotation(manifest, ENGINE_HASH_ANNOTATION)
    return _hash(found) != _hash(manifest) and _annotation(found, ENGINE_HASH_ANNOTATION) not in (
        None,
        wanted,
    )


def _hash(deployment: Object) -> str | None:
    return _annotation(deployment, SPEC_HASH_ANNOTATION)


def _annotation(manifest: Object, name: str) -> str | None:
    found: str | None = manifest["metadata"].get("annotations", {}).get(name)
    return found


def _component(manifest: Object) -> str:
    return str(manifest["metadata"].get("labels", {}).get(COMPONENT_LABEL, ""))


def _progress(deployment: Mapping[str, Any]) -> str | None:
    for condition in deployment.get("status", {}).get("conditions", []):
        if condition["type"] == "Progressing":
            return str(condition.get("reason"))
    return None
