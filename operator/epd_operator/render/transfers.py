"""The engines' transfer configs. Both ends of a transfer are derived from one field of the resource."""

import json
from typing import Any

from ..api import EPDDeployment
from ..api.store import KVTransfer
from ..wire import ec_connector
from .errors import RenderError
from .roles import RoleTraits
from .store import STORE_PATH, Mount, memory_mount, storage_mount, store_places

KV_PATH = f"{STORE_PATH}/kv"
"""Where KV crosses as files. The store's own folders have names of hex digits alone."""


def kv_transfer(deployment: EPDDeployment) -> KVTransfer | None:
    """How prefill hands its KV to decode; None where one role does both."""
    if deployment.spec.roles.pd is not None:
        return None
    return deployment.spec.kv_transfer or KVTransfer()


def transfer_flags(deployment: EPDDeployment, traits: RoleTraits) -> list[str]:
    """The flags of a role for both transfers. Raises RenderError."""
    flags = []
    if traits.ec_role is not None:
        ec = ec_connector(deployment.spec.ec_store, store_places(deployment))
        flags += ["--ec-transfer-config", _json({**ec, "ec_role": traits.ec_role})]
    kv = kv_transfer(deployment)
    if kv is not None and traits.kv_role is not None:
        flags += ["--kv-transfer-config", _json({**_kv_connector(deployment, kv), "kv_role": traits.kv_role})]
    return flags


def transfer_mounts(deployment: EPDDeployment, traits: RoleTraits) -> list[Mount]:
    """The volumes that a role's transfers need."""
    kv = kv_transfer(deployment)
    has_kv_files = kv is not None and traits.kv_role is not None and kv.type == "sharedStorage"
    mounts = []
    if traits.ec_role is not None or has_kv_files:
        mounts.append(storage_mount(deployment))
    if traits.ec_role is not None:
        mounts.append(memory_mount(deployment))
    return [mount for mount in mounts if mount is not None]


def _kv_connector(deployment: EPDDeployment, kv: KVTransfer) -> dict[str, Any]:
    if kv.type == "nixl":
        return {"kv_connector": "NixlKVConnector", "kv_connector_extra_config": kv.extra_config}
    if deployment.spec.ec_store.shared_storage is None:
        raise RenderError(
            "spec.kvTransfer.type", "sharedStorage needs a volume: give `ecStore.sharedStorage`"
        )
    return {
        "kv_connector": "SharedStorageKVConnector",
        "kv_connector_extra_config": {"shared_storage_path": KV_PATH, **kv.extra_config},
    }


def _json(config: dict[str, Any]) -> str:
    """In one order, whatever order the resource has."""
    return json.dumps(config, sort_keys=True)
