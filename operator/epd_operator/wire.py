"""What engines and janitor are told of the two transfers: the same in pods and under `epd up`."""

import json
from dataclasses import dataclass
from typing import Any

from .api import duration_seconds
from .api.deployment import Spec
from .api.store import ECStore
from .roles import RoleTraits

KV_FOLDER = "kv"
"""Where KV crosses as files, beside the store's own folders, which have names of hex digits alone."""


@dataclass(frozen=True)
class Connectors:
    """What one engine calls its connectors; None for what it has none for."""

    files: str
    memory: str | None
    tiers: str
    module: str | None
    """Where the EC connectors are imported from; None: they are the engine's own."""
    nixl: str
    kv_files: str | None


CONNECTORS = {
    "native": Connectors(
        files="ECSharedStorageConnector",
        memory="ECSharedMemoryConnector",
        tiers="ECTieredConnector",
        module=None,
        nixl="NixlKVConnector",
        kv_files="SharedStorageKVConnector",
    ),
    "vllm": Connectors(
        files="EPDStoreConnector",
        memory=None,
        tiers="EPDTieredConnector",
        module="epd_engine.vllm.connector",
        nixl="NixlConnector",
        kv_files=None,
    ),
}
"""By `engine.type`. What is None is refused by the resource's own rules (`api.deployment`)."""


@dataclass(frozen=True)
class StorePlaces:
    """Where a process finds the store's tiers; None for a tier that there is not."""

    storage: str | None
    """Directory of the files."""
    memory: str | None
    """Directory on a tmpfs."""
    memory_capacity: int | None
    """Bytes that all producers may take there together; None: what the mount has."""


def transfer_flags(
    spec: Spec, traits: RoleTraits, places: StorePlaces, kv_ip: str | None = None
) -> list[str]:
    """An engine's flags for both transfers, where `places` has what they need. `kv_ip`: the address at which
    peers reach it, where it is told by its flags and KV crosses by NIXL."""
    flags = []
    if traits.ec_role is not None:
        ec = _ec_connector(spec, places)
        flags += ["--ec-transfer-config", _json({**ec, "ec_role": traits.ec_role})]
    if traits.kv_role is not None:
        kv = _kv_connector(spec, places, kv_ip)
        flags += ["--kv-transfer-config", _json({**kv, "kv_role": traits.kv_role})]
    return flags


def janitor_command(engine: str, store: ECStore, places: StorePlaces, host: str, port: int) -> list[str]:
    """The janitor's command line; `engine` is the program."""
    command = [engine, "store", "janitor"]
    if places.storage is not None and store.shared_storage is not None:
        command += ["--path", places.storage]
        if store.shared_storage.capacity_bytes is not None:
            command += ["--capacity", str(store.shared_storage.capacity_bytes)]
        if store.shared_storage.ttl is not None:
            command += ["--ttl", _seconds(store.shared_storage.ttl)]
    if places.memory is not None:
        command += ["--memory-path", places.memory]
    return [*command, "--host", host, "--port", str(port)]


def _ec_connector(spec: Spec, places: StorePlaces) -> dict[str, Any]:
    """The engine's EC transfer config but for the role, which alone differs between the two ends."""
    names, store = CONNECTORS[spec.engine.type], spec.ec_store
    if places.memory is None:
        name, extra = names.files, _storage(places)
    elif places.storage is None:
        assert names.memory is not None
        name, extra = names.memory, _memory(store, places)
    else:
        name = names.tiers
        extra = {
            "memory": _memory(store, places),
            "storage": _storage(places),
            "write": store.write or "through",
        }
    connector: dict[str, Any] = {"ec_connector": name, "ec_connector_extra_config": extra}
    return connector if names.module is None else {**connector, "ec_connector_module_path": names.module}


def _kv_connector(spec: Spec, places: StorePlaces, kv_ip: str | None) -> dict[str, Any]:
    names = CONNECTORS[spec.engine.type]
    extra = spec.kv_transfer.extra_config if spec.kv_transfer is not None else {}
    if spec.kv_transfer_type == "nixl":
        address = {} if kv_ip is None else {"kv_ip": kv_ip}
        return {"kv_connector": names.nixl, "kv_connector_extra_config": extra, **address}
    return {
        "kv_connector": names.kv_files,
        "kv_connector_extra_config": {"shared_storage_path": f"{places.storage}/{KV_FOLDER}", **extra},
    }


def _storage(places: StorePlaces) -> dict[str, Any]:
    return {"shared_storage_path": places.storage}


def _memory(store: ECStore, places: StorePlaces) -> dict[str, Any]:
    assert store.shared_memory is not None
    extra: dict[str, Any] = {
        "path": places.memory,
        "lease_seconds": duration_seconds(store.shared_memory.lease_timeout),
    }
    return extra if places.memory_capacity is None else {**extra, "capacity": places.memory_capacity}


def _seconds(duration: str) -> str:
    """As a plain number: no exponent, and no fraction where there is none."""
    seconds = duration_seconds(duration)
    return str(int(seconds)) if seconds.is_integer() else str(seconds)


def _json(config: dict[str, Any]) -> str:
    """In one order, whatever order the document has."""
    return json.dumps(config, sort_keys=True)
