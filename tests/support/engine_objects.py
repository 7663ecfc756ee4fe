"""Small engine objects for tests of pure decisions: requests, items, and a store that is a set."""

from collections.abc import Sequence

import torch

from epd_engine.core.request import MediaItem, Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.ec_transfer.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECModelIdentity,
)
from epd_engine.ec_transfer.config import ECTransferConfig

IDENTITY = ECModelIdentity("f" * 64, width=8, dtype=torch.float32)


def key(name: str) -> str:
    """A well-formed mm_hash that is readable in a failing test."""
    return name.encode().hex().ljust(64, "0")


def item(
    name: str, offset: int, num_embeds: int, *, pixels: bool = False, grid: Sequence[int] = (1, 2, 2)
) -> MediaItem:
    features = {"pixel_values": torch.zeros(1)} if pixels else None
    return MediaItem("image", key(name), num_embeds, {"image_grid_thw": list(grid)}, offset, features)


def request(name: str, num_tokens: int, media: list[MediaItem] | None = None, max_tokens: int = 4) -> Request:
    positions = torch.arange(num_tokens).expand(3, -1)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, list(range(num_tokens)), positions, 0, media or [], sampling, frozenset({-1}))


class SetConnector(ECConnectorBase):
    """The scheduler side of a connector over a set of keys; counts how often it was asked."""

    def __init__(self, stored: set[str], role: str = "ec_consumer"):
        config = ECTransferConfig("SetConnector", role)  # type: ignore[arg-type]
        super().__init__(config, ECConnectorRole.SCHEDULER, IDENTITY)
        self.stored, self.probes = stored, 0
        self.loads: list[str] = []
        self.saves: list[str] = []
        self.acknowledged: list[str] = []

    def has_cache_item(self, item: MediaItem) -> bool:
        self.probes += 1
        return item.mm_hash in self.stored

    def update_state_after_alloc(self, request: Request, index: int, *, load: bool) -> None:
        (self.loads if load else self.saves).append(request.media[index].mm_hash)

    def acknowledge(self, item: MediaItem) -> None:
        self.acknowledged.append(item.mm_hash)

    def build_connector_meta(self) -> ECConnectorMetadata:
        return ECConnectorMetadata()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def save_caches(self, encoder_cache: object, mm_hash: str) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError

    def get_finished(self) -> object:  # type: ignore[override]
        raise NotImplementedError
