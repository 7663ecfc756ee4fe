"""The scheduler side: what a request needs is read and checked before the step that uses it is planned.

vLLM ends the engine when an encoder output that it planned to load is not there, or not as large as planned.
So nothing is planned on hope: an item counts as external only once its entry lies here as a checked tensor,
and a request that knows an item by its key alone, where that cannot be had, is reported as unavailable.

What if the store is slow, gone, or lies? Slow: the requests that wait are deferred, others go on. Gone or
lying: items that came as media are encoded, others fail their request, which is retryable.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from epd_engine.core.request import MediaItem, Request
from epd_engine.ec_transfer.base import ECConnectorBase
from epd_engine.vllm.loader import Loader, as_request
from epd_engine.vllm.metrics import StoreStats, TransferDelta
from epd_engine.vllm.model import Features
from epd_engine.vllm.step import StepPlan, WorkerReport

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.005
"""How long a step's planning waits for loads that are under way, before their request is deferred."""


@dataclass
class _Course:
    """A request between its first look-up and its end.

    `loads` are entries on their way or here, by key. `held` are keys that lie in the encoder cache for this
    request, so that nobody can evict them; `saves` is what a producer publishes for it, `checked` what it has
    looked for in the store although it is resident. `num_computed` tells a preemption: nothing is held then.
    `acknowledged` are keys of which the store hears that this request needs nothing more from it.
    """

    features: list[Any]
    items: list[MediaItem | None]
    request: Request
    loads: dict[str, "Future[torch.Tensor]"] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    saves: dict[str, MediaItem] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    num_computed: int = 0
    is_unavailable: bool = False

    def loaded(self, key: str) -> torch.Tensor | None:
        """The checked entry, where it has arrived."""
        load = self.loads.get(key)
        return None if load is None or not load.done() or load.exception() else load.result()


class SchedulerSide:
    """`saver` is a producer's connector, or None where nothing is saved."""

    def __init__(self, features: Features, loader: Loader, saver: ECConnectorBase | None):
        self._features, self._loader, self._saver = features, loader, saver
        self._courses: dict[str, _Course] = {}
        self._current: _Course | None = None
        self._resident: dict[str, MediaItem] = {}
        """What vLLM's encoder cache holds, by what it was planned as."""
        self._unavailable: set[str] = set()
        self._plan = StepPlan()
        self._stats = StoreStats()
        self._loaded, self._saved = TransferDelta(), TransferDelta()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be planned: what it needs from the store is here, or is known not to be
        there and can be encoded. False: not yet, or never (`take_unavailable_requests`)."""
        course = self._current = self._course(request)
        if num_computed_tokens < course.num_computed:
            course.held.clear()
        course.num_computed = num_computed_tokens
        ahead = [
            index
            for index, feature in enumerate(course.features)
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        if course.is_unavailable:
            return False
        self._acknowledge(course, [i for i in range(len(course.features)) if i not in ahead])
        if not ahead:
            return True
        if self._saver is None and all(self._is_settled(course, index) for index in ahead):
            self._acknowledge(course, ahead)
            return True
        # Also what is resident but not held: room for one item may be made by evicting another.
        wanted = [
            item for index in ahead if (item := course.items[index]) and item.mm_hash not in course.held
        ]
        for item in wanted:
            if item.mm_hash not in course.loads:
                course.acknowledged.add(item.mm_hash)  # by the load itself
                course.loads[item.mm_hash] = self._loader.load(item)
        if wait([course.loads[item.mm_hash] for item in wanted], PATIENCE_SECONDS).not_done:
            return False
        if any(not self._can_have(course, index) for index in ahead):
            course.is_unavailable = True
            self._unavailable.add(request.request_id)
            self._stats.add("ec_load_failures")
            return False
        if self._saver is not None:
            self._save_again(course, ahead)
        return True

    def take_unavailable_requests(self) -> set[str]:
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def has_cache_item(self, key: str) -> bool:
        """Asked about items of the request that was ensured last, when they are not in the encoder cache."""
        course = self._current
        if course is None:
            return False
        if key not in course.loads:
            # Believed to be resident: vLLM has reset its encoder cache.
            item = next((item for item in course.items if item and item.mm_hash == key), None)
            if item is None:
                return False
            course.loads[key] = self._loader.load(item)
            wait([course.loads[key]])
        return course.loaded(key) is not None

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Item `index` has its room in the encoder cache: it is loaded, or else vLLM encodes it."""
        course = self._course(request)
        item = course.items[index]
        if item is None:
            return
        tensor = course.loaded(item.mm_hash)
        course.loads.pop(item.mm_hash, None)
        course.held.add(item.mm_hash)
        self._resident[item.mm_hash] = item
        if tensor is not None:
            self._plan.loads[item.mm_hash] = tensor
            self._stats.add("ec_external_hits")
            self._stats.add("ec_loads")
            return
        self._stats.add("ec_misses")
        self._plan_save(course, index)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        for key in scheduler_output.free_encoder_mm_hashes:
            self._resident.pop(key, None)
        plan, self._plan = self._plan, StepPlan()
        if self._saver is not None:
            plan.saves = self._saver.build_connector_meta()
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._saved.add_to(self._stats, report.totals, "save")

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """What a primer's answer says: only items that any reader finds in the store."""
        course = self._courses.pop(request.request_id, None)
        if self._current is course:
            self._current = None
        if course is None:
            return None
        if self._saver is None:
            self._acknowledge(course, range(len(course.items)))
            return None
        # The step that saved them has waited for them.
        output = self._saver.settle(list(course.saves.values()))
        self._stats.add("ec_saves", len(output.finished_sending))
        self._stats.add("ec_save_failures", len(output.failed_sending))
        self._saver.request_finished(course.request)
        published = {item.mm_hash for item in course.items if item and self._saver.is_published(item)}
        answer = self._features.primer_answer(course.features)
        return {key: said for key, said in answer.items() if key in published}

    def take_stats(self) -> StoreStats:
        """What happened since the last call."""
        self._loaded.add_to(self._stats, self._loader.totals(), "load")
        stats, self._stats = self._stats, StoreStats()
        return stats

    def close(self) -> None:
        self._loader.close()
        if self._saver is not None:
            self._saver.shutdown()

    def _course(self, request: Any) -> _Course:
        course = self._courses.get(request.request_id)
        if course is None or len(course.features) != len(request.mm_features):
            items = [self._features.item(feature) for feature in request.mm_features]
            media = [item or _STRANGER for item in items]
            course = _Course(list(request.mm_features), items, as_request(request.request_id, media))
            self._courses[request.request_id] = course
        return course

    def _is_settled(self, course: _Course, index: int) -> bool:
        """Whether the item lies in the encoder cache, as the same that this request means."""
        item = course.items[index]
        resident = None if item is None else self._resident.get(item.mm_hash)
        return item is not None and resident is not None and resident.is_same_media(item)

    def _can_have(self, course: _Course, index: int) -> bool:
        """Whether vLLM gets the item from somewhere, once all loads have ended."""
        item = course.items[index]
        if self._features.is_computable(course.features[index]):
            return True
        if item is None:
            log.warning(
                "an item without media has no key of the EC store: %.80s", course.features[index].identifier
            )
            return False
        if item.mm_hash in course.held or course.loaded(item.mm_hash) is not None:
            return self._agrees(item)
        log.warning("entry %s cannot be had: %s", item.mm_hash, course.loads[item.mm_hash].exception())
        return False

    def _agrees(self, item: MediaItem) -> bool:
        """Whether what is resident under the item's key, if anything is, is the same as what is meant."""
        resident = self._resident.get(item.mm_hash)
        if resident is None or resident.is_same_media(item):
            return True
        log.warning("entry %s is asked for as %s and is %s", item.mm_hash, item.metadata, resident.metadata)
        return False

    def _acknowledge(self, course: _Course, indices: Iterable[int]) -> None:
        """An encoder keeps what it published for this request, which needs it no more: it is resident, or its
        KV is known."""
        for index in indices:
            item = course.items[index]
            if self._saver is None and item is not None and item.mm_hash not in course.acknowledged:
                course.acknowledged.add(item.mm_hash)
                self._loader.acknowledge(item)

    def _save_again(self, course: _Course, ahead: list[int]) -> None:
        """Items that vLLM will not encode, since it has them, and that the store has lost."""
        for index in ahead:
            item = course.items[index]
            if item is None or item.mm_hash in course.checked or item.mm_hash not in self._resident:
                continue
            course.checked.add(item.mm_hash)
            if course.loaded(item.mm_hash) is None and item.mm_hash not in course.held:
                self._plan_save(course, index)
                self._plan.again.append(item.mm_hash)

    def _plan_save(self, course: _Course, index: int) -> None:
        item = course.items[index]
        if self._saver is not None and item is not None:
            self._saver.update_state_after_alloc(course.request, index, load=False)
            course.saves[item.mm_hash] = item


_STRANGER = MediaItem("", "", 0, {})
"""In the place of an item that the store has nothing to do with."""
