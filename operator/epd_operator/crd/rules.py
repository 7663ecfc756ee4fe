"""What a schema cannot say, in CEL: the rules of `epd_operator.api`'s validators, and those of changes.

They are data: where a rule stands, what must hold, what is said when it does not, and how new an API server
must be for it. The same holds in Python, for API servers without CEL: `api` checks a document, `transitions`
a change.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .levels import CelLevel
from .schema import Schema

_ROLES = tuple(f"spec.roles.{role}" for role in ("encoder", "pd", "prefill", "decode"))
_WORKLOADS = (*_ROLES, "spec.proxy")
_COMMANDS = (*_WORKLOADS, "spec.ecStore.janitor")
_STORES = ("spec.ecStore.sharedStorage", "spec.ecStore.sharedMemory")
_METRICS = tuple(f"{role}.autoscaling.metrics[]" for role in _ROLES)
_TARGETS = tuple(
    f"{metric}.{source}.target" for metric in _METRICS for source in ("resource", "pods", "external")
)

_IS_VLLM = "has(self.engine) && has(self.engine.type) && self.engine.type == 'vllm'"

# The claim that the operator makes where a document says nothing (api.store.ClaimTemplate).
_DEFAULT_SIZE = "10Gi"
_DEFAULT_MODES = "['ReadWriteMany']"


@dataclass(frozen=True)
class Rule:
    """One rule, at each of its places; `oldSelf` in it makes it a rule of changes."""

    places: tuple[str, ...]
    """Paths in the resource; `[]` stands for the entries of a list, and no path for the resource itself."""
    cel: str
    message: str
    level: CelLevel = CelLevel.BASIC


def _exactly_the_one_named(fields: dict[str, str]) -> str:
    """Of some fields, the one that belongs to `type` is set and no other."""
    return " && ".join(f"has(self.{field}) == (self.type == '{kind}')" for field, kind in fields.items())


def _has(root: str, path: str) -> str:
    """Whether a field and all above it are there; optional chaining needs a newer API server."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[:end])})" for end in range(1, len(parts) + 1))


_OF_A_DOCUMENT = (
    Rule(
        ("spec.roles",),
        "has(self.pd) ? !has(self.prefill) && !has(self.decode) : has(self.prefill) && has(self.decode)",
        "takes pd, or prefill and decode",
    ),
    Rule(
        _ROLES,
        "!(has(self.replicas) && has(self.autoscaling))",
        "takes replicas or autoscaling, not both: remove replicas to scale by load",
    ),
    Rule(
        ("spec",),
        "!(has(self.kvTransfer) && has(self.roles.pd))",
        "kvTransfer has no meaning with pd: it joins prefill and decode",
    ),
    Rule(
        ("spec",),
        f"!({_IS_VLLM} && has(self.ecStore) && !has(self.ecStore.sharedStorage))",
        "ecStore needs files with engine.type vllm, alone or after memory: give ecStore.sharedStorage",
    ),
    Rule(
        ("spec",),
        f"!({_IS_VLLM} && has(self.ecStore) && has(self.ecStore.write) && self.ecStore.write == 'back')",
        "ecStore.write must be through with engine.type vllm, or absent",
    ),
    Rule(
        ("spec",),
        f"!({_IS_VLLM} && has(self.kvTransfer) && has(self.kvTransfer.type)"
        " && self.kvTransfer.type == 'sharedStorage')",
        "kvTransfer.type must be nixl with engine.type vllm, or absent, which is the same",
    ),
    Rule(
        ("spec.model",),
        "!has(self.revision) || !(self.source.startsWith('/') || self.source.startsWith('./')"
        " || self.source.startsWith('../'))",
        "revision has no meaning where source is a path",
    ),
    Rule(
        ("spec.model",),
        "!has(self.claim) || ((self.source.startsWith('./') || self.source.startsWith('/models/'))"
        " && !self.source.contains('..'))",
        "with claim, source must be a path in it, such as ./my-model or /models/my-model",
    ),
    Rule(
        ("spec.ecStore",),
        "has(self.sharedStorage) || has(self.sharedMemory)",
        "needs sharedStorage, sharedMemory or both (all defaults: sharedStorage: {})",
    ),
    Rule(
        ("spec.ecStore",),
        "!has(self.write) || (has(self.sharedStorage) && has(self.sharedMemory))",
        "write has a meaning only with both sharedStorage and sharedMemory",
    ),
    Rule(
        ("spec.ecStore",),
        "!(has(self.sharedStorage) && has(self.sharedMemory) && has(self.sharedStorage.existingClaim)"
        " && has(self.sharedMemory.existingClaim)"
        " && self.sharedStorage.existingClaim == self.sharedMemory.existingClaim)",
        "sharedStorage and sharedMemory name one claim; each needs one of its own",
    ),
    # At the root, which alone knows the name. Names too long for their children are the operator's to check.
    *(
        Rule(
            ("",),
            f"!(has(self.spec) && {_has('self', f'spec.ecStore.{store}.existingClaim')}"
            f" && self.spec.ecStore.{store}.existingClaim"
            " in [self.metadata.name + '-store', self.metadata.name + '-store-memory'])",
            f"spec.ecStore.{store}.existingClaim is the claim that the operator makes for this resource:"
            " leave it out to use that one, or name another",
        )
        for store in ("sharedStorage", "sharedMemory")
    ),
    Rule(
        _STORES,
        "!(has(self.claimTemplate) && has(self.existingClaim))",
        "takes claimTemplate or existingClaim, not both",
    ),
    Rule(
        _STORES,
        "!has(self.capacity) || quantity(string(self.capacity)).isGreaterThan(quantity('0'))",
        "capacity must be more than 0",
        CelLevel.QUANTITY,
    ),
    Rule(
        _STORES,
        "!has(self.capacity) || has(self.existingClaim) || (has(self.claimTemplate)"
        " ? quantity(string(self.capacity)).compareTo(quantity(string(self.claimTemplate.size))) <= 0"
        f" : quantity(string(self.capacity)).compareTo(quantity('{_DEFAULT_SIZE}')) <= 0)",
        f"capacity must not be more than the claim's size ({_DEFAULT_SIZE} where none is given)",
        CelLevel.QUANTITY,
    ),
    Rule(
        tuple(f"{workload}.strategy.rollingUpdate" for workload in _WORKLOADS),
        "self.maxSurge > 0 || self.maxUnavailable > 0",
        "maxSurge and maxUnavailable must not both be 0: no replica could be replaced",
    ),
    Rule(
        tuple(f"{workload}.strategy" for workload in _WORKLOADS),
        "!(self.type == 'Recreate' && has(self.rollingUpdate))",
        "rollingUpdate has no meaning with type Recreate",
    ),
    Rule(
        tuple(f"{command}.env[]" for command in _COMMANDS),
        "!(has(self.value) && has(self.valueFrom))",
        "takes value or valueFrom, not both",
    ),
    Rule(
        tuple(f"{role}.autoscaling" for role in _ROLES),
        "self.minReplicas <= self.maxReplicas",
        "minReplicas must not be more than maxReplicas",
    ),
    Rule(
        tuple(f"{role}.autoscaling" for role in _ROLES),
        "self.minReplicas > 0 || (self.provider != 'resource' && (!has(self.metrics)"
        " || size(self.metrics) == 0 || self.metrics.exists(metric, metric.type == 'External')))",
        "minReplicas 0 needs a metric that is there without pods: another provider than resource, and of"
        " metrics that are given one of type External",
    ),
    Rule(
        ("spec.roles",),
        " && ".join(
            f"!(has(self.{role}) && has(self.{role}.autoscaling) && self.{role}.autoscaling.minReplicas == 0)"
            for role in ("pd", "prefill", "decode")
        ),
        "minReplicas 0 is for encoders: without pd, prefill or decode nothing is answered",
    ),
    Rule(
        _METRICS,
        _exactly_the_one_named({"resource": "Resource", "pods": "Pods", "external": "External"}),
        "takes the field that its type names (resource, pods or external) and no other source",
    ),
    Rule(
        _TARGETS,
        _exactly_the_one_named(
            {"averageUtilization": "Utilization", "value": "Value", "averageValue": "AverageValue"}
        ),
        "takes the number that its type names (averageUtilization, value or averageValue) and no other",
    ),
)


def _makes_a_claim(root: str, store: str) -> str:
    """Whether the operator makes the store's claim: not where one exists, and for files by default."""
    wanted = f"{_has(root, f'ecStore.{store}')} && !has({root}.ecStore.{store}.existingClaim)"
    return f"(!has({root}.ecStore) || {wanted})" if store == "sharedStorage" else f"({wanted})"


def _compared(path: str, default: str, compare: Callable[[str, str], str]) -> str:
    """A comparison of a field's new and old value, each of which may be absent and stands for `default` then.

    Every comparison is between fields and literals, never between results of `?:`, whose size an API server
    might not know and so take for unlimited when it estimates costs.
    """
    new, old = f"self.{path}", f"oldSelf.{path}"
    return (
        f"({_has('self', path)}"
        f" ? ({_has('oldSelf', path)} ? {compare(new, old)} : {compare(new, default)})"
        f" : ({_has('oldSelf', path)} ? {compare(default, old)} : true))"
    )


def _same(new: str, old: str) -> str:
    return f"{new} == {old}"


def _no_less(new: str, old: str) -> str:
    return f"quantity(string({new})).compareTo(quantity(string({old}))) >= 0"


def _claim_rules(store: str) -> tuple[Rule, ...]:
    """A claim that was made can grow, and nothing else.

    They stand at the spec, for an absent `ecStore` or `claimTemplate` is a claim too: with all its defaults.
    """
    template = f"ecStore.{store}.claimTemplate"
    other = f"!({_makes_a_claim('self', store)} && {_makes_a_claim('oldSelf', store)}) || "
    fixed = "cannot be changed: the claim exists; use another resource, or existingClaim"
    name, modes, size = (f"{template}.{field}" for field in ("storageClassName", "accessModes", "size"))
    return (
        Rule(("spec",), other + _compared(name, "''", _same), f"{name} {fixed}"),
        Rule(("spec",), other + _compared(modes, _DEFAULT_MODES, _same), f"{modes} {fixed}"),
        Rule(
            ("spec",),
            other + _compared(size, f"'{_DEFAULT_SIZE}'", _no_less),
            f"{size} may only grow",
            CelLevel.QUANTITY,
        ),
    )


RULES = (*_OF_A_DOCUMENT, *_claim_rules("sharedStorage"), *_claim_rules("sharedMemory"))


def add_rules(schema: Schema, level: CelLevel) -> None:
    """Puts the rules of a level into the schema of the resource."""
    for rule in RULES:
        if level.includes(rule.level):
            for place in rule.places:
                validations = _schema_at(schema, place).setdefault("x-kubernetes-validations", [])
                validations.append({"rule": rule.cel, "message": rule.message})


def _schema_at(schema: Schema, place: str) -> Schema:
    for part in place.split(".") if place else ():
        name, is_list = part.removesuffix("[]"), part.endswith("[]")
        schema = schema["properties"][name]
        if is_list:
            schema = schema["items"]
    return schema
