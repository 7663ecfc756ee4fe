"""What the janitor keeps a store to."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """`capacity` in bytes (None: nine tenths of the volume), marks as fractions of it, times in seconds.

    `grace` is how long an entry is spared after its last use, as far as the high mark allows, and how old a
    temporary file or an empty directory must be to count as left behind. `rate` is how many deletions,
    moves and re-checks a second the volume is bothered with. `scrub` is how many bytes a second of payload
    are read against their checksums; 0 for none. `kv_ttl` is the age at which KV that is on its way from
    prefill to decode is what a dead instance left.
    """

    capacity: int | None = None
    high_water: float = 0.9
    low_water: float = 0.8
    ttl: float | None = None
    max_entries: int | None = None
    grace: float = 300.0
    rate: float = 1000.0
    scrub: int = 0
    kv_ttl: float = 3600.0

    def __post_init__(self) -> None:
        """Raises ValueError, in terms of the command's flags."""
        if not 0 < self.low_water <= self.high_water <= 1:
            raise ValueError("--low-water and --high-water must be fractions, 0 < low <= high <= 1")
        for flag, value in (
            ("--capacity", self.capacity),
            ("--ttl", self.ttl),
            ("--max-entries", self.max_entries),
            ("--rate", self.rate),
            ("--kv-ttl", self.kv_ttl),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"{flag} must be positive, got {value}")
        if self.grace < 0 or self.scrub < 0:
            raise ValueError("--grace and --scrub must not be negative")

    def budget(self, root: Path) -> int:
        """The capacity in bytes. Raises OSError."""
        if self.capacity is not None:
            return self.capacity
        volume = os.statvfs(root)
        return volume.f_blocks * volume.f_frsize * 9 // 10
