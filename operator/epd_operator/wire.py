"""What engines and janitor are told of the EC store: the same in pods and as processes of this machine."""

from dataclasses import dataclass
from typing import Any

from .api import duration_seconds
from .api.store import ECStore

PRODUCER, CONSUMER = "ec_producer", "ec_consumer"


@dataclass(frozen=True)
class StorePlaces:
    """Where a process finds the store's tiers; None for a tier that there is not."""

    storage: str | None
    """Directory of the files."""
    memory: str | None
    """Directory on a tmpfs."""
    memory_capacity: int | None
    """Bytes that all producers may take there together; None: what the mount has."""


def ec_connector(store: ECStore, places: StorePlaces) -> dict[str, Any]:
    """The engine's EC transfer config but for the role, which alone differs between the two ends."""
    if places.memory is None:
        return _connector("ECSharedStorageConnector", _storage(places))
    if places.storage is None:
        return _connector("ECSharedMemoryConnector", _memory(store, places))
    tiers = {"memory": _memory(store, places), "storage": _storage(places), "write": store.write or "through"}
    return _connector("ECTieredConnector", tiers)


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


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"ec_connector": name, "ec_connector_extra_config": extra}


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
