"""Both sides of a connector in one process, stepped as the engine steps them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from epd_engine.core.request import MediaItem
from epd_engine.ec_transfer.base import ECConnectorOutput, ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECTransferConfig
from epd_engine.ec_transfer.factory import ECConnectorFactory
from epd_engine.worker.ec_step import ec_step
from tests.support.engine_objects import IDENTITY, item, request


class Instance:
    """An instance that holds no model: its encoder is a function of the item's key."""

    def __init__(
        self, connector: str, role: str, extra: Mapping[str, Any], identity: ECModelIdentity = IDENTITY
    ):
        config = ECTransferConfig(connector, role, ec_connector_extra_config=extra)  # type: ignore[arg-type]
        self.scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER, identity)
        self.worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER, identity)
        self.cache: dict[str, torch.Tensor] = {}
        self.worker.register_caches(self.cache, torch.device("cpu"))
        self._requests = 0

    def has(self, media: MediaItem) -> bool:
        return self.scheduler.has_cache_item(media)

    def publish(self, *media: MediaItem, wait: bool = True) -> ECConnectorOutput:
        """One encoding step over `media`, the request's end included."""
        self._requests += 1
        asked = request(f"r{self._requests}", 0, list(media))
        saved = []
        for index in range(len(media)):
            if self.scheduler.ensure_cache_available(asked, index):
                self.scheduler.update_state_after_alloc(asked, index, load=False)
                saved.append(media[index].mm_hash)
        output = self.step(saves=saved, wait=wait)
        self.scheduler.request_finished(asked)
        return output

    def load(self, *media: MediaItem) -> ECConnectorOutput:
        asked = request("load", 64, list(media))
        for index in range(len(media)):
            self.scheduler.update_state_after_alloc(asked, index, load=True)
        return self.step()

    def step(self, saves: Sequence[str] = (), *, wait: bool = True) -> ECConnectorOutput:
        plan = self.scheduler.build_connector_meta()
        with ec_step(self.worker, plan, self.cache, wait_for_saves=wait) as output:
            for key in saves:
                self.cache.setdefault(key, encoded(key))
                self.worker.save_caches(self.cache, key)
        self.scheduler.update_connector_output(output)
        return output

    def forget(self) -> None:
        """As an encoder cache that was needed for others."""
        self.cache.clear()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def encoded(key: str, rows: int = 4) -> torch.Tensor:
    """`[rows, IDENTITY.width]`, another one for each key."""
    generator = torch.Generator().manual_seed(int(key[:15], 16))
    return torch.rand(rows, IDENTITY.width, generator=generator)


def picture(name: str) -> MediaItem:
    """An item of 4 embeddings."""
    return item(name, 0, 4, pixels=True)
