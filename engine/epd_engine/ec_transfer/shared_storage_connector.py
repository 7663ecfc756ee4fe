"""`ECSharedStorageConnector`: entries as files on a volume that every instance mounts."""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from epd_engine.ec_store.errors import EntryDamaged, EntryMissing, StoreError
from epd_engine.ec_store.file_store import FileStore, NewEntry, Verify
from epd_engine.ec_store.group_commit import GroupCommit
from epd_engine.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorRole,
    ECModelIdentity,
)
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig, read_extra_config

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "shared_storage_path": "/tmp",
    "namespace": None,  # None: the first 16 digits of the model fingerprint
    "fsync": None,  # None: unless the path is in memory
    "verify": "always",  # or "sample", "never"
    "touch": True,
    "accept_foreign": False,  # entries without our metadata, as vLLM's file connector writes them
}


@dataclass
class SharedStorageMetadata(ECConnectorMetadata):
    """Items to load into, and to save from, the encoder cache in one step, by mm_hash."""

    loads: dict[str, "MediaItem"] = field(default_factory=dict)
    saves: dict[str, "MediaItem"] = field(default_factory=dict)


class ECSharedStorageConnector(ECConnectorBase):
    """Producers save what they encode, consumers load it; the store's files are all they share."""

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity):
        super().__init__(config, role, identity)
        extra = read_extra_config(config, DEFAULTS)
        if "shared_storage_path" not in config.ec_connector_extra_config and role is ECConnectorRole.WORKER:
            log.warning(
                "shared_storage_path is not set: the EC store is at %s", DEFAULTS["shared_storage_path"]
            )
        namespace = identity.fingerprint[:16] if extra["namespace"] is None else extra["namespace"]
        if extra["verify"] not in get_args(Verify):
            raise ECConfigError(
                f"ec_connector_extra_config key 'verify' must be one of {', '.join(get_args(Verify))}"
            )
        if type(extra["fsync"]) not in (bool, type(None)):
            raise ECConfigError("ec_connector_extra_config key 'fsync' must be a bool, or null for automatic")
        try:
            self.store = FileStore(
                Path(extra["shared_storage_path"]),
                namespace,
                fsync=extra["fsync"],
                verify=extra["verify"],
                touch=extra["touch"],
                accept_foreign=extra["accept_foreign"],
            )
        except (TypeError, ValueError) as error:
            raise ECConfigError(f"ec_connector_extra_config: {error}") from error
        if role is ECConnectorRole.WORKER:
            _make_root(Path(extra["shared_storage_path"]))
        self._plan = SharedStorageMetadata()
        self._output = ECConnectorOutput()
        self._saves: dict[str, Future[None]] = {}
        saves_here = role is ECConnectorRole.WORKER and config.is_producer
        self._saver = GroupCommit(self.store) if saves_here else None

    # Scheduler side

    def has_cache_item(self, item: "MediaItem") -> bool:
        try:
            self.store.probe(
                item.mm_hash,
                self.identity.expectation(item),
                deep=self.config.is_encode_only,
            )
        except EntryMissing:
            return False
        except EntryDamaged as error:
            log.warning("entry %s is not used: %s", item.mm_hash, error)
            return False
        except StoreError as error:
            log.error("%s", error)
            return False
        return True

    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        item = request.media[index]
        if load:
            self._plan.loads[item.mm_hash] = item
        elif self.config.is_producer:
            self._plan.saves[item.mm_hash] = item

    def build_connector_meta(self) -> SharedStorageMetadata:
        plan, self._plan = self._plan, SharedStorageMetadata()
        return plan

    # Worker side

    @property
    def _bound(self) -> SharedStorageMetadata:
        assert isinstance(self._metadata, SharedStorageMetadata), "no metadata is bound for this step"
        return self._metadata

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        for key, item in self._bound.loads.items():
            try:
                expected = self.identity.expectation(item)
                encoder_cache[key] = self.store.load(key, expected, self._device, patient=True)
            except StoreError as error:
                log.warning("entry %s cannot be loaded: %s", key, error)
                self._output.failed_recving[key] = str(error)
            else:
                self._output.finished_recving.add(key)

    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        item = self._bound.saves.get(mm_hash)
        if item is None:
            return
        assert self._saver is not None, "only a producer saves"
        entry = NewEntry(
            mm_hash, encoder_cache[mm_hash], self.identity.fingerprint, item.modality, item.metadata
        )
        self._saves[mm_hash] = self._saver.submit(entry)

    def wait_for_save(self) -> None:
        wait(self._saves.values())
        self._collect_saves()

    def get_finished(self) -> ECConnectorOutput:
        self._collect_saves()
        output, self._output = self._output, ECConnectorOutput()
        return output

    def shutdown(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _collect_saves(self) -> None:
        for key in [key for key, save in self._saves.items() if save.done()]:
            try:
                self._saves.pop(key).result()
            except StoreError as error:
                log.error("entry %s cannot be saved: %s", key, error)
                self._output.failed_sending[key] = str(error)
            else:
                self._output.finished_sending.add(key)


def _make_root(path: Path) -> None:
    """Found out at start, not at the first picture: a store that cannot be there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ECConfigError(f"shared_storage_path {path} cannot be used: {error.strerror}") from error
