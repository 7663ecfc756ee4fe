"""The engines' transfers: flags and volumes. Both ends of one are derived from one field of the resource."""

from .. import wire
from ..api import EPDDeployment
from ..roles import RoleTraits
from .errors import RenderError
from .store import Mount, memory_mount, storage_mount, store_places


def transfer_flags(deployment: EPDDeployment, traits: RoleTraits, kv_ip: str | None = None) -> list[str]:
    """The flags of a role for both transfers, as `wire` has them. Raises RenderError."""
    spec = deployment.spec
    if spec.kv_transfer_type == "sharedStorage" and spec.ec_store.shared_storage is None:
        raise RenderError(
            "spec.kvTransfer.type", "sharedStorage needs a volume: give `ecStore.sharedStorage`"
        )
    return wire.transfer_flags(spec, traits, store_places(deployment), kv_ip)


def transfer_mounts(deployment: EPDDeployment, traits: RoleTraits) -> list[Mount]:
    """The volumes that a role's transfers need."""
    has_kv_files = traits.kv_role is not None and deployment.spec.kv_transfer_type == "sharedStorage"
    mounts = []
    if traits.ec_role is not None or has_kv_files:
        mounts.append(storage_mount(deployment))
    if traits.ec_role is not None:
        mounts.append(memory_mount(deployment))
    return [mount for mount in mounts if mount is not None]
