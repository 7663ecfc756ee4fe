"""Reading entries before a step is planned around them."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from epd_engine.core.request import MediaItem, Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.ec_store.errors import EntryDamaged, EntryMissing
from epd_engine.ec_store.statistics import TransferStats
from epd_engine.ec_transfer.base import ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECTransferConfig
from epd_engine.ec_transfer.factory import ECConnectorFactory
from epd_engine.worker.ec_step import ec_step


class Loader:
    """Both sides of a consumer's connector in a thread of their own: a slow volume delays the requests that
    wait for it and no others.

    Each load is a step of that connector, with all that it does for other instances: leases, the
    acknowledgement to the writer, and where there are tiers the promotion into memory.
    """

    def __init__(self, config: ECTransferConfig, identity: ECModelIdentity):
        """Raises `ECConfigError`."""
        consumer = dataclasses.replace(config, ec_role="ec_consumer")
        self._scheduler = ECConnectorFactory.create_connector(consumer, ECConnectorRole.SCHEDULER, identity)
        self._worker = ECConnectorFactory.create_connector(consumer, ECConnectorRole.WORKER, identity)
        self._worker.register_caches({}, torch.device("cpu"))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ec-loader")
        self._loads = 0

    def load(self, item: MediaItem) -> "Future[torch.Tensor]":
        """The entry of `item`, whole and checked: `[num_embeds, width]` on the CPU.

        The future raises `EntryMissing` or `EntryDamaged`.
        """
        return self._thread.submit(self._load, item)

    def acknowledge(self, item: MediaItem) -> None:
        """A request for which `item` was published does without a load."""
        self._thread.submit(self._scheduler.acknowledge, item)

    def totals(self) -> Mapping[str, TransferStats]:
        """What was loaded since start, by tier."""
        return self._worker.statistics()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._scheduler.shutdown()
        self._worker.shutdown()

    def _load(self, item: MediaItem) -> torch.Tensor:
        if not self._scheduler.has_cache_item(item):
            raise EntryMissing(f"no usable entry {item.mm_hash}")
        self._loads += 1
        request = as_request(f"load-{self._loads}", [item])
        self._scheduler.update_state_after_alloc(request, 0, load=True)
        loaded: dict[str, torch.Tensor] = {}
        plan = self._scheduler.build_connector_meta()
        with ec_step(self._worker, plan, loaded, wait_for_saves=False) as output:
            pass
        self._scheduler.update_connector_output(output)
        self._scheduler.request_finished(request)
        if item.mm_hash not in loaded:
            raise EntryDamaged(output.failed_recving.get(item.mm_hash, "it was not loaded"))
        return loaded[item.mm_hash]


def as_request(request_id: str, media: list[MediaItem]) -> Request:
    """A request of which a connector need only know the media."""
    return Request(request_id, [], torch.empty(0), 0, media, SamplingParams(max_tokens=1))
