"""`ECSharedStorageConnector`: entries as files on a volume that every instance mounts."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from epd_engine.ec_store.errors import StoreError
from epd_engine.ec_store.file_store import FileStore, NewEntry, Verify
from epd_engine.ec_store.group_commit import GroupCommit
from epd_engine.ec_transfer.base import ECConnectorOutput, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig, read_extra_config
from epd_engine.ec_transfer.store_connector import StoreConnector, StorePlan

if TYPE_CHECKING:
    from epd_engine.core.request import MediaItem, Request

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, Any] = {
    "shared_storage_path": "/tmp",
    "namespace": None,  # None: the first 16 digits of the model fingerprint
    "fsync": None,  # None: unless the path is in memory
    "verify": "always",  # or "sample", "never"
    "touch": True,
    "lease_seconds": 60.0,
    "accept_foreign": False,  # entries without our metadata, as vLLM's file connector writes them
}


@dataclass(frozen=True)
class _Save:
    future: Future[None]
    num_bytes: int
    begun: float


class ECSharedStorageConnector(StoreConnector):
    """Producers save what they encode, consumers load it; the store's files are all they share."""

    tier = "storage"

    def __init__(self, config: ECTransferConfig, role: ECConnectorRole, identity: ECModelIdentity):
        extra = _read(config)
        root = Path(extra["shared_storage_path"])
        if "shared_storage_path" not in config.ec_connector_extra_config and role is ECConnectorRole.WORKER:
            log.warning("shared_storage_path is not set: the EC store is at %s", root)
        namespace = identity.fingerprint[:16] if extra["namespace"] is None else extra["namespace"]
        try:
            self.store = FileStore(
                root,
                namespace,
                fsync=extra["fsync"],
                verify=extra["verify"],
                touch=extra["touch"],
                accept_foreign=extra["accept_foreign"],
            )
        except (TypeError, ValueError) as error:
            raise ECConfigError(f"ec_connector_extra_config: {error}") from error
        super().__init__(config, role, identity, base=root / namespace, lease_seconds=extra["lease_seconds"])
        if role is ECConnectorRole.WORKER:
            _make_root(root)
        # Scheduler side: what is being saved. Worker side: the same, with what becomes of it.
        self._saving: set[str] = set()
        self._saves: dict[str, _Save] = {}
        saves_here = role is ECConnectorRole.WORKER and config.is_producer
        self._saver = GroupCommit(self.store) if saves_here else None

    # Scheduler side

    def update_state_after_alloc(self, request: "Request", index: int, *, load: bool) -> None:
        if load or request.media[index].mm_hash not in self._saving:
            super().update_state_after_alloc(request, index, load=load)

    def build_connector_meta(self) -> StorePlan:
        plan = super().build_connector_meta()
        self._saving.update(plan.saves)
        return plan

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        super().update_connector_output(output)
        self._saving -= output.finished_sending | set(output.failed_sending)

    def _probe(self, item: "MediaItem", *, deep: bool) -> None:
        self.store.probe(item.mm_hash, self.identity.expectation(item), deep=deep)

    # Worker side

    def save_caches(self, encoder_cache: Mapping[str, torch.Tensor], mm_hash: str) -> None:
        item = self._bound.saves.pop(mm_hash, None)
        if item is None:
            return
        assert self._saver is not None, "only a producer saves"
        entry = NewEntry(
            mm_hash, encoder_cache[mm_hash], self.identity.fingerprint, item.modality, item.metadata
        )
        begun = time.perf_counter()
        self._saves[mm_hash] = _Save(self._saver.submit(entry), entry.tensor.nbytes, begun)

    def wait_for_save(self) -> None:
        wait([save.future for save in self._saves.values()])

    def get_finished(self) -> ECConnectorOutput:
        for key, save in list(self._saves.items()):
            if not save.future.done():
                continue
            del self._saves[key]
            try:
                save.future.result()
            except StoreError as error:
                log.error("entry %s cannot be saved: %s", key, error)
                self._output.failed_sending[key] = str(error)
            else:
                self._output.finished_sending.add(key)
                self.transfers.saved(save.num_bytes, time.perf_counter() - save.begun)
        return super().get_finished()

    def shutdown(self) -> None:
        super().shutdown()
        if self._saver is not None:
            self._saver.close()

    def _load(self, item: "MediaItem") -> torch.Tensor:
        return self.store.load(item.mm_hash, self.identity.expectation(item), self._device, patient=True)


def _read(config: ECTransferConfig) -> dict[str, Any]:
    extra = read_extra_config(config, DEFAULTS)
    if extra["verify"] not in get_args(Verify):
        raise ECConfigError(
            f"ec_connector_extra_config key 'verify' must be one of {', '.join(get_args(Verify))}"
        )
    if type(extra["fsync"]) not in (bool, type(None)):
        raise ECConfigError("ec_connector_extra_config key 'fsync' must be a bool, or null for automatic")
    if extra["lease_seconds"] <= 0:
        raise ECConfigError("ec_connector_extra_config key 'lease_seconds' must be more than 0")
    return extra


def _make_root(path: Path) -> None:
    """Found out at start, not at the first picture: a store that cannot be there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ECConfigError(f"shared_storage_path {path} cannot be used: {error.strerror}") from error
