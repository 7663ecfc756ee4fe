"""Pure: from a resource as the API server has it to one that can be carried out, or why it cannot."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ..api import EPDDeployment
from ..api.names import child_name
from ..api.problems import explain, path_of
from ..apply.kinds import CLAIM
from ..apply.plan import Ref
from ..crd.transitions import claim_conflicts

Object = dict[str, Any]

INVALID = "InvalidSpec"
_METADATA = ("name", "namespace", "uid", "generation")


class RefusedError(Exception):
    """A resource that is not carried out; its children stay as they are. `lines` is never empty."""

    def __init__(self, reason: str, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.reason = reason
        self.lines = lines


def read(resource: Object, children: Mapping[Ref, Object]) -> EPDDeployment:
    """The resource in our terms. Raises RefusedError.

    The API server checks most of this, too, where it knows CEL; what it holds may be older than its rules.
    """
    metadata = {name: resource["metadata"][name] for name in _METADATA if name in resource["metadata"]}
    document = {
        "apiVersion": resource["apiVersion"],
        "kind": resource["kind"],
        "metadata": metadata,
        "spec": resource.get("spec"),
    }
    try:
        deployment = EPDDeployment.model_validate(document)
    except ValidationError as error:
        lines = [f"{path_of(where)}: {words}" for where, words in explain(error, EPDDeployment)]
        raise RefusedError(INVALID, lines) from None
    conflicts = [str(change) for change in _conflicts(deployment, children)]
    if conflicts:
        raise RefusedError(INVALID, conflicts)
    return deployment


def _conflicts(deployment: EPDDeployment, children: Mapping[Ref, Object]) -> Iterator[object]:
    """Changes that cannot be carried out: the claim on the cluster remembers what was wanted."""
    for store, tier in deployment.spec.ec_store.tiers.items():
        name = child_name(deployment.metadata.name, tier.claim_suffix)
        claim = children.get(Ref(CLAIM.kind, name))
        if claim is not None:
            yield from claim_conflicts(deployment.spec, store, claim)
