"""The store's claims, and how pods mount them."""

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ..api import EPDDeployment, quantity_value
from ..api.store import ClaimedStore, ClaimTemplate
from .labels import child
from .names import child_name
from .quantities import canonical_quantity

STORE_PATH = "/var/lib/epd/store"
"""Where engines see the volume of `ecStore.sharedStorage`."""
MEMORY_PATH = "/var/lib/epd/memory"
"""Where engines see the volume of `ecStore.sharedMemory`."""
STORE = "store"
MEMORY = "store-memory"
_CAPACITY_SHARE = Decimal("0.9")


@dataclass(frozen=True)
class Mount:
    """One volume in a pod."""

    volume: dict[str, Any]
    mount: dict[str, Any]


def claims(deployment: EPDDeployment) -> Iterator[dict[str, Any]]:
    """The claims that the operator makes; none for a claim that exists."""
    store = deployment.spec.ec_store
    if store.shared_storage is not None and store.shared_storage.existing_claim is None:
        # A claim with an owner would be collected with it.
        owned = store.shared_storage.retention == "Delete"
        yield _claim(deployment, store.shared_storage, STORE, owned=owned)
    if store.shared_memory is not None and store.shared_memory.existing_claim is None:
        yield _claim(deployment, store.shared_memory, MEMORY, owned=True)


def storage_mount(deployment: EPDDeployment) -> Mount | None:
    """The volume of files, where there is one. Writable for readers too: they touch what they use."""
    return _mount(deployment, deployment.spec.ec_store.shared_storage, STORE, STORE_PATH)


def memory_mount(deployment: EPDDeployment) -> Mount | None:
    """The volume in memory, where there is one."""
    return _mount(deployment, deployment.spec.ec_store.shared_memory, MEMORY, MEMORY_PATH)


def capacity_bytes(store: ClaimedStore) -> int | None:
    """Bytes that entries may take: as given, or nine tenths of the claim. None: known from the mount only."""
    if store.capacity is not None:
        return int(quantity_value(store.capacity))
    if store.existing_claim is not None:
        return None
    return int(quantity_value((store.claim_template or ClaimTemplate()).size) * _CAPACITY_SHARE)


def _claim(deployment: EPDDeployment, store: ClaimedStore, suffix: str, *, owned: bool) -> dict[str, Any]:
    template = store.claim_template or ClaimTemplate()
    manifest = child(deployment, "v1", "PersistentVolumeClaim", suffix, STORE, owned=owned)
    manifest["spec"] = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": canonical_quantity(template.size)}},
    }
    if template.storage_class_name is not None:
        manifest["spec"]["storageClassName"] = template.storage_class_name
    return manifest


def _mount(deployment: EPDDeployment, store: ClaimedStore | None, suffix: str, path: str) -> Mount | None:
    if store is None:
        return None
    claim = store.existing_claim or child_name(deployment.metadata.name, suffix)
    return Mount(
        volume={"name": suffix, "persistentVolumeClaim": {"claimName": claim}},
        mount={"name": suffix, "mountPath": path},
    )
