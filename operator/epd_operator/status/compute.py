"""The whole status, from what was observed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from ..api import EPDDeployment, Workload
from ..api.status import Condition, RolesStatus, RoleStatus, Status, language_of
from ..apply.rollout import Held
from ..render import child_name, claim_names, endpoint, roles_of, selector
from ..render.affinity import JANITOR
from ..render.labels import COMPONENT_LABEL
from .conditions import STORE, verdicts, with_times
from .load import Load, load_summary, reported_load
from .parts import Object, PartState, Problem
from .roles import held_back, role_state
from .scalers import contested
from .store import store_state
from .usage import Usage, reported

PROXY = "proxy"
_ROLES = tuple(RolesStatus.model_fields)[:4]


@dataclass(frozen=True)
class Observed:
    """What a status is computed from."""

    resource: Object
    """The resource as the API server has it."""
    deployment: EPDDeployment | None
    """The resource as we understand it; None where its spec is refused."""
    problems: Sequence[Problem] = ()
    """Problems of the whole."""
    held: Mapping[str, Held] = field(default_factory=dict)
    """Roles whose change waits for another role's."""
    deployments: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    claims: Mapping[str, Object] = field(default_factory=dict)
    """By name; also claims that are not ours."""
    usage: Usage | None = None
    """What the store's janitor said last; None where nothing was heard."""
    loads: Mapping[str, Load] | None = None
    """How full roles are, of those that say so; None where nobody was asked yet."""
    scalers: Sequence[Object] = ()
    """Autoscalers of the namespace that are not ours."""


def compute_status(observed: Observed, now: str) -> Object:
    """The status as the API server shall have it, without what others put into it."""
    resource, deployment = observed.resource, observed.deployment
    parts = _parts(observed)
    where = endpoint(deployment) if deployment is not None else resource.get("status", {}).get("endpoint")
    generation = resource["metadata"].get("generation", 0)
    paused = deployment is not None and deployment.spec.paused
    found = verdicts(parts, observed.problems, paused=paused, endpoint=where)
    status = Status.model_validate(
        {
            "observedGeneration": generation,
            "conditions": list(with_times(found, previous_conditions(resource), generation, now)),
            "roles": _roles_status(parts, observed),
            "endpoint": where,
            "store": reported(resource.get("status", {}).get("store"), observed.usage),
        }
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def previous_conditions(resource: Object) -> list[Condition]:
    """The conditions that a resource has; none where they are not ours to read."""
    try:
        return [Condition.model_validate(one) for one in resource.get("status", {}).get("conditions", [])]
    except ValidationError:
        return []


def _parts(observed: Observed) -> dict[str, PartState]:
    """The state of each part; of a refused spec, of the parts that exist."""
    deployments = {_component(one): one for one in observed.deployments}
    if observed.deployment is not None:
        names = [*(name for name, _ in roles_of(observed.deployment)), PROXY]
    else:
        names = [name for name in (*_ROLES, PROXY) if name in deployments]
    pods: dict[str, list[Object]] = {name: [] for name in (*names, JANITOR)}
    for pod in observed.pods:
        pods.setdefault(_component(pod), []).append(pod)
    resource_name = observed.resource["metadata"]["name"]

    def state_of(name: str) -> PartState:
        labels = selector(resource_name, name)
        text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        return role_state(deployments.get(name), pods[name], text)

    parts = {name: held_back(state_of(name), observed.held.get(name)) for name in names}
    if observed.deployment is not None:
        workloads: dict[str, Workload] = dict(roles_of(observed.deployment))
        workloads[PROXY] = observed.deployment.spec.proxy
        for name, workload in workloads.items():
            target = child_name(resource_name, name)
            parts[name] = contested(parts[name], workload, target, observed.scalers)
        claims = [(name, observed.claims.get(name)) for name in claim_names(observed.deployment).values()]
        parts[STORE] = store_state(claims, observed.pods, state_of(JANITOR))
    return parts


def _component(found: Object) -> str:
    return str(found["metadata"].get("labels", {}).get(COMPONENT_LABEL, ""))


def _roles_status(parts: Mapping[str, PartState], observed: Observed) -> RolesStatus:
    counts: dict[str, RoleStatus] = {}
    before = observed.resource.get("status", {}).get("roles", {})
    for name in _ROLES:
        part = parts.get(name)
        if part is not None and part.counts is not None:
            load = before.get(name, {}).get("load")
            if observed.loads is not None:
                load = reported_load(load, observed.loads.get(name))
            counts[name] = part.counts.model_copy(update={"load": load})
    language = language_of(counts.get("pd"), counts.get("prefill"), counts.get("decode"))
    summary = load_summary({name: one.load for name, one in counts.items()})
    return RolesStatus(**counts, language=language, load=summary)
