"""The store's claims, and how pods mount them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..api import EPDDeployment
from ..api.names import child_name
from ..api.store import ClaimedStore, ClaimTemplate, SharedMemory, SharedStorage
from ..wire import StorePlaces
from .labels import child
from .quantities import canonical_quantity

STORE_PATH = "/var/lib/epd/store"
"""Where engines see the volume of `ecStore.sharedStorage`."""
MEMORY_PATH = "/var/lib/epd/memory"
"""Where engines see the volume of `ecStore.sharedMemory`."""
COMPONENT = "store"


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
        yield _claim(deployment, store.shared_storage, owned=owned)
    if store.shared_memory is not None and store.shared_memory.existing_claim is None:
        yield _claim(deployment, store.shared_memory, owned=True)


def storage_mount(deployment: EPDDeployment) -> Mount | None:
    """The volume of files, where there is one. Writable for readers too: they touch what they use."""
    return _mount(deployment, deployment.spec.ec_store.shared_storage, STORE_PATH)


def memory_mount(deployment: EPDDeployment) -> Mount | None:
    """The volume in memory, where there is one."""
    return _mount(deployment, deployment.spec.ec_store.shared_memory, MEMORY_PATH)


def store_places(deployment: EPDDeployment) -> StorePlaces:
    """Where pods find the tiers."""
    store = deployment.spec.ec_store
    return StorePlaces(
        storage=None if store.shared_storage is None else STORE_PATH,
        memory=None if store.shared_memory is None else MEMORY_PATH,
        memory_capacity=None if store.shared_memory is None else store.shared_memory.capacity_bytes,
    )


def claim_names(deployment: EPDDeployment) -> dict[str, str]:
    """Names of the claims that the tiers use, by the tiers' names."""
    return {name: _claim_name(deployment, tier) for name, tier in deployment.spec.ec_store.tiers.items()}


def _claim_name(deployment: EPDDeployment, store: ClaimedStore) -> str:
    return store.existing_claim or child_name(deployment.metadata.name, store.claim_suffix)


def _claim(deployment: EPDDeployment, store: SharedStorage | SharedMemory, *, owned: bool) -> dict[str, Any]:
    template = store.claim_template or ClaimTemplate()
    suffix = store.claim_suffix
    manifest = child(deployment, "v1", "PersistentVolumeClaim", suffix, COMPONENT, owned=owned)
    manifest["spec"] = {
        "accessModes": list(template.access_modes),
        "resources": {"requests": {"storage": canonical_quantity(template.size)}},
    }
    if template.storage_class_name is not None:
        manifest["spec"]["storageClassName"] = template.storage_class_name
    return manifest


def _mount(deployment: EPDDeployment, store: ClaimedStore | None, path: str) -> Mount | None:
    if store is None:
        return None
    name, claim = store.claim_suffix, _claim_name(deployment, store)
    return Mount(
        volume={"name": name, "persistentVolumeClaim": {"claimName": claim}},
        mount={"name": name, "mountPath": path},
    )
