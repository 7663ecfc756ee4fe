"""Continuous batching for an instance with a language model.

A step is `schedule -> execute -> update`. Running requests come before waiting ones, prefill is chunked
under one token budget, and a request waits before a picture that is not there yet without holding compute.
"""

import logging
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from epd_engine.core.kv_blocks import BlockPool, block_hashes
from epd_engine.core.media_planner import MediaPlanner, Placement, missing_item_error
from epd_engine.core.output import Chunk, ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason, Request, RequestError, RequestStatus

log = logging.getLogger(__name__)


class SchedulerInterface(Protocol):
    """What the engine loop needs of a scheduler."""

    def add(self, request: Request) -> None:
        """Raises `RequestError` for a request that could never be served."""

    def abort(self, request_id: str) -> None:
        """Ends a request at any state and frees what it holds; unknown ids are ignored."""

    def schedule(self) -> SchedulerOutput: ...

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]: ...

    def fail_step(self, step: SchedulerOutput, error: RequestError) -> list[RequestUpdate]:
        """Ends every request of a step that could not be executed."""

    def problems(self) -> list[str]:
        """What does not add up when there are no requests: leaks, in words."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler:
    """Decides each step's chunks and media; owns the requests and the KV ledger."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, planner: MediaPlanner):
        self._limits, self._pool, self._planner = limits, pool, planner
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank: who is preempted has no chunk in this step yet
        self._errors: list[RequestUpdate] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._planner.check_admissible(request)
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=attrgetter("rank"))

    def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)

    def schedule(self) -> SchedulerOutput:
        step = SchedulerOutput()
        self._planner.begin_step()
        budget = self._limits.max_num_batched_tokens
        preempted = False
        for request in list(self._running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier one, or failed
            while not self._has_room(request, budget):
                victim = self._running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                budget -= self._schedule_chunk(request, budget, step)
        while self._waiting and not preempted and budget > 0 and self.num_running < self._limits.max_num_seqs:
            request = self._waiting[0]
            self._take_over_prefix(request)
            if not self._has_room(request, budget):
                self._pool.release(request.block_ids)
                request.num_computed_tokens = request.num_cached_tokens = 0
                break
            del self._waiting[0]
            request.status = RequestStatus.RUNNING
            step.cached_prompt_tokens += request.num_cached_tokens
            insort(self._running, request, key=attrgetter("rank"))
            budget -= self._schedule_chunk(request, budget, step)
        step.freed_encoder_hashes = self._planner.cache.take_freed()
        if self._planner.connector is not None:
            step.ec_connector_metadata = self._planner.connector.build_connector_meta()
        return step

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        updates, self._errors = self._errors, []
        self._take_ec_output(output)
        for chunk in step.chunks:
            request = chunk.request
            if request.is_finished:
                continue  # aborted while the step ran
            if request.request_id in output.skipped:
                if error := self._settle_skipped(chunk, output):
                    updates.append(self._fail(request, error))
                continue
            request.num_computed_tokens = chunk.end
            self._learn_blocks(chunk)
            for index in request.media_in(chunk.start, chunk.end):
                if request.media[index].end <= chunk.end:
                    self._planner.cache.release(request, index)
            if reason := output.sample_problems.get(request.request_id):
                updates.append(self._fail(request, RequestError(400, "grammar_failed", reason)))
            elif request.request_id in output.sampled:
                updates.append(self._append_token(request, output))
        return updates

    def fail_step(self, step: SchedulerOutput, error: RequestError) -> list[RequestUpdate]:
        updates, self._errors = self._errors, []
        if self._planner.connector is not None:
            self._planner.connector.update_connector_output(step.failed(str(error)))
        for request, index in step.scheduled_encoder_inputs + step.external_load_encoder_input:
            self._planner.cache.drop(request.media[index].mm_hash)
        return updates + [self._fail(c.request, error) for c in step.chunks if not c.request.is_finished]

    def problems(self) -> list[str]:
        return self._pool.problems() + self._planner.cache.problems()

    def _take_over_prefix(self, request: Request) -> None:
        """Holds what is known of the request's beginning. Its last token is computed whatever is known, since
        the next one is sampled from it; media in a known part are never asked for."""
        most = (request.num_tokens - 1) // self._pool.block_size
        hashes = block_hashes(request, self._pool.block_size, most)
        request.block_ids[:] = self._pool.take_known(hashes)
        request.num_computed_tokens = len(request.block_ids) * self._pool.block_size
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)

    def _learn_blocks(self, chunk: Chunk) -> None:
        size, request = self._pool.block_size, chunk.request
        first, last = chunk.start // size, chunk.end // size
        for index, digest in enumerate(block_hashes(request, size, last)[first:last], first):
            self._pool.learn(request.block_ids[index], digest)

    def _has_room(self, request: Request, budget: int) -> bool:
        """Whether KV blocks can be had for the longest chunk of this step; media only shorten it."""
        end = min(request.num_tokens, request.num_computed_tokens + budget)
        return self._pool.blocks_for(end) - len(request.block_ids) <= self._pool.num_free

    def _schedule_chunk(self, request: Request, budget: int, step: SchedulerOutput) -> int:
        """Plans the next tokens of `request`, stopping before media that are not there; returns how many."""
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + budget)
        for index in request.media_in(start, end):
            placement = self._planner.place(request, index, step)
            if placement is Placement.MISSING:
                self._errors.append(self._fail(request, missing_item_error(request.media[index])))
                return 0
            if placement is not Placement.READY:
                end = request.media[index].offset
                break
        if end <= start:
            return 0
        grown = self._pool.grow(request.block_ids, end)
        assert grown, "room was checked for a longer chunk"
        step.chunks.append(Chunk(request, start, end - start))
        return end - start

    def _take_ec_output(self, output: ModelRunnerOutput) -> None:
        if self._planner.connector is not None:
            self._planner.connector.update_connector_output(output.ec_output)
        for key in [*output.ec_output.failed_recving, *output.encode_errors]:
            self._planner.cache.drop(key)

    def _settle_skipped(self, chunk: Chunk, output: ModelRunnerOutput) -> RequestError | None:
        """After media failed to arrive: an item that failed to load is not in the store, so that the next
        step computes it or reports the miss; one that failed to encode fails its request."""
        for index in chunk.request.media_in(chunk.start, chunk.end):
            key = chunk.request.media[index].mm_hash
            if key in output.encode_errors:
                return RequestError(500, "encoder_failed", output.encode_errors[key])
            if key in output.ec_output.failed_recving:
                chunk.request.in_store[index] = False
        return None

    def _append_token(self, request: Request, output: ModelRunnerOutput) -> RequestUpdate:
        token, said = output.sampled[request.request_id], output.logprobs.get(request.request_id)
        request.output_token_ids.append(token)
        reason = None
        if token in request.eos_token_ids:
            reason = FinishReason.STOP
        elif (
            len(request.output_token_ids) >= request.sampling.max_tokens
            or request.num_tokens >= self._limits.max_model_len
        ):
            reason = FinishReason.LENGTH
        params = None
        if reason is not None:
            params = self._end(request)
        logprobs = () if said is None else (said,)
        return RequestUpdate(request.request_id, (token,), reason, None, params, logprobs)

    def _preempt(self, request: Request) -> None:
        """By recompute: everything the request holds goes back, and it waits where its rank is."""
        log.info("preempted for lack of KV blocks", extra={"request_id": request.request_id})
        self._running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.in_store.clear()
        request.status = RequestStatus.WAITING
        insort(self._waiting, request, key=attrgetter("rank"))

    def _fail(self, request: Request, error: RequestError) -> RequestUpdate:
        self._end(request)
        return RequestUpdate(request.request_id, error=error)

    def _end(self, request: Request) -> Mapping[str, Any] | None:
        """Frees what the request holds; what the connector has to tell its client, if it ended well."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._release(request)
        del self._requests[request.request_id]
        if self._planner.connector is None:
            return None
        _, params = self._planner.connector.request_finished(request)
        return params

    def _release(self, request: Request) -> None:
        self._pool.release(request.block_ids)
        self._planner.cache.release_all(request)
