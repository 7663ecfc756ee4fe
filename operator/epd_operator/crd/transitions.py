"""Changes that cannot be carried out: the same as the CEL rules of changes, for API servers without CEL.

A claim that was made can grow; its class and access modes are Kubernetes' to refuse. Everything else in the
spec may change.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from epd_operator.api import Spec, quantity_value
from epd_operator.api.store import ClaimedStore, ClaimTemplate

_REMEDY = "use another resource, or `existingClaim`"


@dataclass(frozen=True)
class Change:
    """A change that cannot be carried out."""

    path: str
    """The field, as in `spec.ecStore.sharedStorage.claimTemplate.size`."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def forbidden_changes(old: Spec, new: Spec) -> list[Change]:
    """What of a change from one spec to another cannot be carried out."""
    return [
        change
        for store in ("sharedStorage", "sharedMemory")
        if (before := _template(old, store)) is not None and (after := _template(new, store)) is not None
        for change in _claim_changes(_path(store), before, after)
    ]


def claim_conflicts(spec: Spec, store: str, claim: Mapping[str, Any]) -> list[Change]:
    """How a store's claim, as it is on the cluster, stands in the way of what is wanted.

    `store` is `sharedStorage` or `sharedMemory`. The claim on the cluster remembers what was wanted before,
    so this tells a forbidden change long after it was made. A class that the cluster chose is no conflict.
    """
    wanted = _template(spec, store)
    if wanted is None:
        return []
    found = claim.get("spec", {})
    asked = found.get("resources", {}).get("requests", {}).get("storage")
    observed = ClaimTemplate.model_validate(
        {
            "size": asked or wanted.size,
            "accessModes": found.get("accessModes") or wanted.access_modes,
            "storageClassName": found.get("storageClassName") if wanted.storage_class_name else None,
        }
    )
    return list(_claim_changes(_path(store), observed, wanted))


def _path(store: str) -> str:
    return f"spec.ecStore.{store}.claimTemplate"


def _template(spec: Spec, store: str) -> ClaimTemplate | None:
    """The claim that the operator makes for a store; None where it makes none."""
    stores = spec.ec_store
    claimed: ClaimedStore | None = {
        "sharedStorage": stores.shared_storage,
        "sharedMemory": stores.shared_memory,
    }[store]
    if claimed is None or claimed.existing_claim is not None:
        return None
    return claimed.claim_template or ClaimTemplate()


def _claim_changes(path: str, old: ClaimTemplate, new: ClaimTemplate) -> Iterator[Change]:
    if old.storage_class_name != new.storage_class_name:
        before, after = (one.storage_class_name or "the cluster's default" for one in (old, new))
        yield Change(
            f"{path}.storageClassName",
            f"cannot be changed from {before} to {after}: the claim exists; {_REMEDY}",
        )
    if old.access_modes != new.access_modes:
        before, after = (", ".join(one.access_modes) for one in (old, new))
        yield Change(
            f"{path}.accessModes", f"cannot be changed from {before} to {after}: the claim exists; {_REMEDY}"
        )
    if quantity_value(new.size) < quantity_value(old.size):
        yield Change(f"{path}.size", f"may only grow, not from {old.size} to {new.size}")
