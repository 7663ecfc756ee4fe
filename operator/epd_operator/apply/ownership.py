"""Pure: whose an object is."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..api.names import label_value
from ..render.labels import INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL


@dataclass(frozen=True)
class Owner:
    """A resource, as the owner of its children."""

    name: str
    uid: str


class Ownership(Enum):
    """What an object is to a resource."""

    OWNED = "owned"
    """Its child, which ends with it."""
    KEPT = "kept"
    """Made for it, but without an owner: it outlives the resource, as a retained claim does."""
    FOREIGN = "foreign"
    """Somebody else's; not ours to change, whatever its name is."""


def ownership(live: Mapping[str, Any], owner: Owner) -> Ownership:
    """What an object is to a resource.

    A former resource of the same name is somebody else: its children are about to be collected.
    """
    metadata = live["metadata"]
    references = metadata.get("ownerReferences", [])
    if any(reference["uid"] == owner.uid for reference in references):
        return Ownership.OWNED
    labels = metadata.get("labels", {})
    made_for_it = labels.get(MANAGED_BY_LABEL) == MANAGED_BY and labels.get(INSTANCE_LABEL) == label_value(
        owner.name
    )
    return Ownership.KEPT if made_for_it and not references else Ownership.FOREIGN


def describe_owner(live: Mapping[str, Any]) -> str:
    """Whose a foreign object is, for people."""
    for reference in live["metadata"].get("ownerReferences", []):
        return f"{reference['kind']} {reference['name']}"
    return "somebody else"
