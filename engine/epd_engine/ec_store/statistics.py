"""What went through a store, as totals since start."""

from dataclasses import dataclass


@dataclass
class TransferStats:
    """One side of one store. Seconds are summed over transfers that succeeded, from begin to end."""

    load_bytes: int = 0
    load_seconds: float = 0.0
    save_bytes: int = 0
    save_seconds: float = 0.0

    def loaded(self, num_bytes: int, seconds: float) -> None:
        self.load_bytes += num_bytes
        self.load_seconds += seconds

    def saved(self, num_bytes: int, seconds: float) -> None:
        self.save_bytes += num_bytes
        self.save_seconds += seconds
