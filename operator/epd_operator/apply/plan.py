"""Pure: from what is wanted and what is there to the writes that are needed."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .diff import as_wanted, owned_fields, owns
from .ownership import Owner, Ownership, describe_owner, ownership


class Ref(NamedTuple):
    """What a child is called within its namespace."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def ref_of(manifest: Mapping[str, Any]) -> Ref:
    """What an object is called."""
    return Ref(manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True)
class Plan:
    """The writes that bring a resource's children to what is wanted."""

    apply: list[dict[str, Any]] = field(default_factory=list)
    """Manifests, in the order in which they are needed."""
    hand_over: list[dict[str, Any]] = field(default_factory=list)
    """Deployments, as they are, whose number of replicas we set and must now give up."""
    delete: list[Mapping[str, Any]] = field(default_factory=list)
    """Children, as they are, that are no longer wanted."""
    refused: list[str] = field(default_factory=list)
    """Why a child cannot be made."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be written."""
        return not (self.apply or self.hand_over or self.delete)


def plan(
    desired: Iterable[dict[str, Any]],
    live: Mapping[Ref, dict[str, Any]],
    owner: Owner,
    prunable: Collection[str],
    kept: Collection[Ref] = (),
) -> Plan:
    """The writes that are needed; `prunable` are the kinds of which unwanted children are deleted, but for
    those that are `kept`."""
    result = Plan()
    wanted = set()
    for manifest in desired:
        ref = ref_of(manifest)
        wanted.add(ref)
        found = live.get(ref)
        if found is None:
            result.apply.append(manifest)
        elif ownership(found, owner) is Ownership.FOREIGN:
            result.refused.append(collision(found))
        else:
            fields = owned_fields(found)
            if as_wanted(manifest, found, fields):
                continue
            result.apply.append(manifest)
            if owns(fields, "spec", "replicas") and "replicas" not in manifest["spec"]:
                result.hand_over.append(found)
    for ref, found in live.items():
        unwanted = ref.kind in prunable and ref not in wanted and ref not in kept
        if unwanted and ownership(found, owner) is Ownership.OWNED and not is_ending(found):
            result.delete.append(found)
    return result


def collision(found: Mapping[str, Any]) -> str:
    """What to say about an object that has a child's name."""
    return f"{ref_of(found)} exists and belongs to {describe_owner(found)}; delete or rename it"


def is_ending(live: Mapping[str, Any]) -> bool:
    """Whether an object is being deleted."""
    return live["metadata"].get("deletionTimestamp") is not None
