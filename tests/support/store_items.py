"""Entries whose content anybody can compute again from their key."""

import hashlib
import random
from dataclasses import dataclass

import torch

from epd_engine.core.request import MediaItem
from epd_engine.ec_transfer.base import ECModelIdentity

WIDTH = 64
MIN_ROWS, MAX_ROWS = 64, 1536
MAX_ENTRY_BYTES = MAX_ROWS * WIDTH * 4 + 1024  # as a store charges it
IDENTITY = ECModelIdentity("c" * 64, width=WIDTH, dtype=torch.float32)
NAMESPACE = IDENTITY.fingerprint[:16]


@dataclass(frozen=True)
class Items:
    """`count` items of one seed."""

    seed: int
    count: int

    def one(self, rng: random.Random) -> MediaItem:
        """One of them, the first ones more often than the last."""
        return self[int(self.count * rng.random() ** 2)]

    def some(self, rng: random.Random, most: int) -> list[MediaItem]:
        """Up to `most` different ones."""
        chosen = [self.one(rng) for _ in range(rng.randint(1, most))]
        return list({item.mm_hash: item for item in chosen}.values())

    def by_key(self) -> dict[str, MediaItem]:
        return {self[index].mm_hash: self[index] for index in range(self.count)}

    def __getitem__(self, index: int) -> MediaItem:
        key = hashlib.sha256(f"{self.seed}/{index}".encode()).hexdigest()
        pixels = {"pixel_values": torch.zeros(1)}
        return MediaItem("image", key, rows_of(key), {"image_grid_thw": [1, 2, index]}, 0, pixels)


def rows_of(key: str) -> int:
    return MIN_ROWS + int(key[:8], 16) % (MAX_ROWS - MIN_ROWS + 1)


def tensor_of(key: str) -> torch.Tensor:
    """`[rows_of(key), WIDTH]` float32: what the entry of `key` holds, and no other."""
    generator = torch.Generator().manual_seed(int(key[8:23], 16))
    return torch.rand(rows_of(key), WIDTH, generator=generator)


def difference(key: str, found: torch.Tensor) -> str:
    """In words, how a wrong tensor is wrong."""
    wanted = tensor_of(key)
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    wrong = (found != wanted).any(dim=1).nonzero().flatten()
    first, last = int(wrong[0]), int(wrong[-1])
    return f"{len(wrong)} of {len(wanted)} rows differ, from row {first} to row {last}"
