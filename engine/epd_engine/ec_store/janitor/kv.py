"""KV on its way from prefill to decode, beside the entries: counted, and cleared by its age alone.

Its instances delete it themselves; what is old is what dead ones left. Nobody's answer takes so long.
"""

from pathlib import Path

from epd_engine.ec_store.janitor.lease import StoreLease
from epd_engine.ec_store.janitor.limits import Limits
from epd_engine.ec_store.janitor.pace import Pace
from epd_engine.ec_store.kv_area import KV_DIRECTORY, is_older, remove, transfers, used_bytes


class KVArea:
    """`<root>/kv`, where there is one; its bytes count as used."""

    def __init__(self, root: Path, limits: Limits, lease: StoreLease, pace: Pace):
        self._area = root / KV_DIRECTORY
        self._limits, self._lease, self._pace = limits, lease, pace
        self.bytes = self.transfers = self.refused = 0

    def clear(self, now: float) -> int:
        """Deletes what is too old and counts the rest; how many went. What the volume refused is in
        `refused`. Raises `LeaseLost` or OSError."""
        kept = total = gone = 0
        for transfer in transfers(self._area):
            self._pace.go_on()
            if is_older(transfer, now - self._limits.kv_ttl):
                self._pace.take()
                self._lease.guard()
                try:
                    gone += remove(transfer)
                    continue
                except PermissionError:
                    self.refused += 1
            kept, total = kept + 1, total + used_bytes(transfer)
        self.bytes, self.transfers = total, kept
        return gone
