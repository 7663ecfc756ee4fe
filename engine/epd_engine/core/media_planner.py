"""The heart of EPD: for each media item, use what is resident, load it from the store, or compute it."""

from enum import Enum

from epd_engine.core.encoder_cache_manager import EncoderCacheManager
from epd_engine.core.output import SchedulerOutput
from epd_engine.core.remote_kv import RemotePrefill
from epd_engine.core.request import MediaItem, Request, RequestError
from epd_engine.ec_transfer.base import ECConnectorBase


class Placement(Enum):
    READY = "ready"  # in the encoder cache by the time this step gathers embeddings
    PUBLISHED = "published"  # a producer's answer: the store has it already
    LATER = "later"  # no room in the cache or in this step's compute budget
    MISSING = "missing"  # not in the store, and this instance cannot compute it


class MediaPlanner:
    """Places items within one step's encoder budget. Budgets and sizes are in embeddings."""

    def __init__(
        self,
        cache: EncoderCacheManager,
        connector: ECConnectorBase | None,
        *,
        max_encoder_embeds: int,
        can_compute: bool,
    ):
        self.cache, self.connector = cache, connector
        self._max_encoder_embeds, self._can_compute = max_encoder_embeds, can_compute
        self._budget = max_encoder_embeds

    def begin_step(self) -> None:
        self._budget = self._max_encoder_embeds

    def check_admissible(self, request: Request) -> None:
        """Raises `RequestError` for a request that could never be served, naming the limit."""
        for item in request.media:
            if item.num_embeds > self.cache.capacity:
                raise RequestError(
                    400,
                    "media_too_large",
                    f"an item of {item.num_embeds} embeddings exceeds the encoder cache "
                    f"(--encoder-cache-size {self.cache.capacity})",
                    "messages",
                )
            if self.connector is not None and (reason := self.connector.refusal(item)) is not None:
                raise RequestError(400, "media_too_large", reason, "messages")

    def place(self, request: Request, index: int, step: SchedulerOutput) -> Placement:
        """The three ways for a consumer's item: resident (or set aside for a preempted request), loaded,
        computed. External loads take cache room but no compute budget."""
        if self.cache.conflicts(request.media[index]):
            return Placement.MISSING
        if self.cache.reference_if_cached(request, index):
            self._acknowledge(request, index)
            return Placement.READY
        if self.cache.is_aside(request.media[index]):
            return Placement.READY if self.cache.bring_back(request, index) else Placement.LATER
        if self._in_store(request, index):
            if not self.cache.allocate(request, index):
                return Placement.LATER
            assert self.connector is not None
            self.connector.update_state_after_alloc(request, index, load=True)
            request.acknowledged.add(request.media[index].mm_hash)  # by the load itself
            step.external_load_encoder_input.append((request, index))
            return Placement.READY
        return self._compute(request, index, step)

    def skip_known(self, request: Request) -> None:
        """Media whose KV is known are never placed: another request has computed it."""
        for index, item in enumerate(request.media):
            if item.end <= request.num_computed_tokens:
                self._acknowledge(request, index)

    def forget(self, request: Request) -> None:
        """`request` has ended."""
        self.cache.forget(request)
        for index in range(len(request.media)):
            self._acknowledge(request, index)

    def place_for_publishing(self, request: Request, index: int, step: SchedulerOutput) -> Placement:
        """The same for an encode-only instance, whose goal is an entry in the store.

        The store is asked first: an item that is resident here proves nothing about the volume, which
        may have been cleaned since.
        """
        if self._in_store(request, index):
            return Placement.PUBLISHED
        assert self.connector is not None
        if self.cache.is_cached(request.media[index]):
            if not self.connector.ensure_cache_available(request, index):
                return Placement.LATER
            self.cache.reference_if_cached(request, index)
            self.connector.update_state_after_alloc(request, index, load=False)
            step.republish_encoder_input.append((request, index))
            return Placement.READY
        return self._compute(request, index, step)

    def _compute(self, request: Request, index: int, step: SchedulerOutput) -> Placement:
        item = request.media[index]
        if item.features is None or not self._can_compute:
            return Placement.MISSING
        # An item larger than the whole budget gets a step of its own.
        if item.num_embeds > self._budget and self._budget < self._max_encoder_embeds:
            return Placement.LATER
        if not self.cache.can_allocate(item):
            return Placement.LATER
        if self.connector is not None and not self.connector.ensure_cache_available(request, index):
            return Placement.LATER
        self.cache.allocate(request, index)
        self._budget = max(0, self._budget - item.num_embeds)
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, index, load=False)
        step.scheduled_encoder_inputs.append((request, index))
        return Placement.READY

    def _in_store(self, request: Request, index: int) -> bool:
        if self.connector is None:
            return False
        item = request.media[index]
        if item.mm_hash not in request.in_store:
            request.in_store[item.mm_hash] = self.connector.has_cache_item(item)
        return request.in_store[item.mm_hash]

    def _acknowledge(self, request: Request, index: int) -> None:
        """An encoder published what came without pixels, and keeps it for this request, which has no need of
        it any more. Where the prompt comes from outside, whoever computed it has said so."""
        item = request.media[index]
        if self.connector is None or item.features is not None or isinstance(request.kv, RemotePrefill):
            return
        if item.mm_hash not in request.acknowledged:
            request.acknowledged.add(item.mm_hash)
            self.connector.acknowledge(item)


def missing_item_error(item: MediaItem) -> RequestError:
    """Retryable: the item can be encoded again and the same request sent anew."""
    return RequestError(
        503, "ec_miss", f"the encoder output {item.mm_hash} is not in the EC store; encode it again and retry"
    )
