"""Continuous batching for an instance with a language model.

A step is `schedule -> execute -> update`. Running requests come before waiting ones, prefill is chunked
under one token budget, and a request waits before a picture that is not there yet without holding compute.
"""

import logging
from bisect import insort
from dataclasses import dataclass, replace
from operator import attrgetter

from epd_engine.core.kv_blocks import BlockPool, block_hashes
from epd_engine.core.kv_ledger import KVLedger, comes_from_outside
from epd_engine.core.media_planner import MediaPlanner, Placement, missing_item_error
from epd_engine.core.output import Chunk, ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.remote_kv import RemotePrefill
from epd_engine.core.request import FinishReason, Request, RequestError, RequestStatus
from epd_engine.kv_transfer.base import KVConnectorBase
from epd_engine.kv_transfer.params import missing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Scheduler:
    """Decides each step's chunks and media; owns the requests and the KV ledger."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        planner: MediaPlanner,
        kv_connector: KVConnectorBase | None = None,
    ):
        self._limits, self._pool, self._planner = limits, pool, planner
        self._kv = KVLedger(kv_connector, pool)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._waiting: list[Request] = []  # by rank
        self._running: list[Request] = []  # by rank: who is preempted has no chunk in this step yet
        self._news: list[RequestUpdate] = []  # what came of a request before its step was run

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """KV transfers that somebody waits for are among them."""
        return len(self._waiting) + self._kv.num_pending

    @property
    def num_queued_tokens(self) -> int:
        # A copy of a list is made in one go: the scheduler's thread does not get in between.
        known = [*self._waiting, *self._running]
        return sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in known)

    def add(self, request: Request) -> None:
        self._kv.check_admissible(request)
        if not comes_from_outside(request):  # whose media are in its KV
            self._planner.check_admissible(request)
            self._planner.cache.expect(request)
        self._kv.admit(request)
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=attrgetter("rank"))
        if isinstance(request.kv, RemotePrefill):
            self._begin_answer(request, request.kv)

    def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)
        else:
            self._kv.abort(request_id)

    def schedule(self) -> SchedulerOutput:
        step = SchedulerOutput()
        self._plan_chunks(step)
        self._complete(step)
        return step

    def foresee(self, step: SchedulerOutput) -> SchedulerOutput | None:
        """The step after `step`, whose tokens are not known yet: one more token of everybody who does not
        reach its length. None unless nothing else is unknown: everybody who runs gets a token from `step`,
        nobody can join them, and there are blocks for all. All that it changes is that requests hold the
        blocks that they will need."""
        may_skip = step.scheduled_encoder_inputs or step.external_load_encoder_input  # where media fail
        if may_skip or self._may_admit() or len(step.chunks) < self.num_running:
            return None
        if not all(chunk.samples for chunk in step.chunks):
            return None
        going_on = [r for r in self._running if not self._is_full(r, len(r.output_token_ids) + 1)]
        if not going_on or not all(self._pool.grow(r.block_ids, r.num_tokens + 1) for r in going_on):
            return None
        return SchedulerOutput([Chunk(request, request.num_tokens, 1) for request in going_on])

    def is_still_right(self, foreseen: SchedulerOutput) -> bool:
        """Whether `schedule` would plan the same chunks now: the same requests run, each has got the token
        that was unknown, and nobody joins them."""
        return (
            not self._may_admit()
            and len(foreseen.chunks) == self.num_running
            and all(
                chunk.request is request and chunk.start == request.num_computed_tokens and chunk.samples
                for chunk, request in zip(foreseen.chunks, self._running, strict=True)
            )
        )

    def confirm(self, foreseen: SchedulerOutput) -> bool:
        """In place of `schedule`: completes `foreseen` to be run now. False: it is not right any more."""
        if not self.is_still_right(foreseen):
            return False
        self._complete(foreseen)
        return True

    def _plan_chunks(self, step: SchedulerOutput) -> None:
        self._planner.begin_step()
        budget = self._limits.max_num_batched_tokens
        preempted = False
        for request in list(self._running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an earlier one, or failed
            while not self._has_room(request, budget):
                victim = self._victim(request)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                budget -= self._schedule_chunk(request, budget, step)
        while self._may_admit() and not preempted and budget > 0:
            request = self._waiting[0]
            known = self._take_over_prefix(request)
            if not self._has_room(request, request.num_tokens if comes_from_outside(request) else budget):
                self._pool.release(request.block_ids)
                request.num_computed_tokens = 0
                break
            step.cached_prompt_tokens += known
            if request.num_cached_tokens is None:  # later, after a preemption, they are its own
                request.num_cached_tokens = known
            if comes_from_outside(request) and not self._has_prompt(request):
                continue
            del self._waiting[0]
            self._planner.skip_known(request)
            self._set_running(request)
            budget -= self._schedule_chunk(request, budget, step)

    def _complete(self, step: SchedulerOutput) -> None:
        """Adds what the connectors and the encoder cache have to do, of all that has happened until now."""
        self._kv.plan(step)
        step.encoder_cache_moves = self._planner.cache.take_moves()
        if self._planner.connector is not None:
            step.ec_connector_metadata = self._planner.connector.build_connector_meta()

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        updates, self._news = self._news, []
        self._take_ec_output(output)
        updates += self._take_kv_output(output)
        for chunk in step.chunks:
            request = chunk.request
            if request.is_finished:
                continue  # aborted while the step ran
            if request.request_id in output.skipped:
                if error := self._settle_skipped(request, output):
                    updates.append(self._fail(request, error))
                continue
            request.num_computed_tokens = chunk.end
            self._learn_blocks(request, chunk.start, chunk.end)
            for index in request.media_in(chunk.start, chunk.end):
                if request.media[index].end <= chunk.end:
                    self._planner.cache.release(request, index)
            if reason := output.sample_problems.get(request.request_id):
                updates.append(self._fail(request, RequestError(400, "grammar_failed", reason)))
            elif request.request_id in output.sampled:
                updates += self._append_token(request, output)
        return updates

    def fail_step(self, step: SchedulerOutput, error: RequestError) -> list[RequestUpdate]:
        updates, self._news = self._news, []
        if self._planner.connector is not None:
            self._planner.connector.update_connector_output(step.failed(str(error)))
        for request, index in step.scheduled_encoder_inputs + step.external_load_encoder_input:
            self._planner.cache.drop(request.media[index].mm_hash)
        return updates + [self._fail(c.request, error) for c in step.chunks if not c.request.is_finished]

    @property
    def owes_kv(self) -> bool:
        return self._kv.keeps_blocks

    def problems(self) -> list[str]:
        kept = self._kv.kept_blocks
        return self._pool.problems(kept) + self._planner.cache.problems() + self._kv.problems()

    def _take_over_prefix(self, request: Request) -> int:
        """Holds what is known of the request's beginning, and returns how many tokens of the prompt that is.
        The last token is computed whatever is known, since the next one is sampled from it; media in a known
        part are never asked for."""
        most = (request.num_tokens - 1) // self._pool.block_size
        hashes = block_hashes(request, self._pool.block_size, most)
        request.block_ids[:] = self._pool.take_known(hashes)
        request.num_computed_tokens = len(request.block_ids) * self._pool.block_size
        return min(request.num_computed_tokens, request.num_prompt_tokens)

    def _learn_blocks(self, request: Request, start: int, end: int) -> None:
        """The KV of the request's tokens `[start, end)` is there: full blocks among them are known now."""
        first, last = start // self._pool.block_size, end // self._pool.block_size
        hashes = block_hashes(request, self._pool.block_size, last)
        for index, digest in enumerate(hashes[first:], first):
            self._pool.learn(request.block_ids[index], digest)

    def _has_room(self, request: Request, budget: int) -> bool:
        """Whether KV blocks can be had for the longest chunk of this step; media only shorten it."""
        end = min(request.num_tokens, request.num_computed_tokens + budget)
        return self._pool.blocks_for(end) - len(request.block_ids) <= self._pool.num_free

    def _may_admit(self) -> bool:
        return bool(self._waiting) and self._has_seat()

    def _has_seat(self) -> bool:
        return self.num_running + self._kv.num_loading < self._limits.max_num_seqs

    def _set_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=attrgetter("rank"))

    def _begin_answer(self, request: Request, prefilled: RemotePrefill) -> None:
        """Takes over the first token. Where it is the last one too, nothing needs to be loaded."""
        request.output_token_ids.append(prefilled.first_token_id)
        if (reason := self._finish_reason(request)) is not None:
            self._end(request)
            self._news.append(self._first_token(request, prefilled, reason))

    def _first_token(
        self, request: Request, prefilled: RemotePrefill, reason: FinishReason | None = None
    ) -> RequestUpdate:
        said = prefilled.first_token_logprobs
        token = prefilled.first_token_id
        return RequestUpdate(request.request_id, (token,), reason, logprobs=() if said is None else (said,))

    def _has_prompt(self, request: Request) -> bool:
        """Whether the prompt's KV, which comes from outside, lies here already; otherwise its load begins, or
        the request ends."""
        try:
            num_external = self._kv.num_external_tokens(request)
        except LookupError as error:
            self._news.append(self._fail(request, missing(str(error))))
            return False
        if num_external:
            grown = self._pool.grow(request.block_ids, request.num_prompt_tokens)
            assert grown, "room was checked for more"
            self._waiting.remove(request)
            self._kv.begin_load(request, num_external)
            return False
        self._tell_first_token(request, self._news)
        return True

    def _tell_first_token(self, request: Request, updates: list[RequestUpdate]) -> None:
        """To the client, once: not before the KV is here, and not again after a preemption."""
        if isinstance(request.kv, RemotePrefill) and not request.is_begun:
            request.is_begun = True
            updates.append(self._first_token(request, request.kv))

    def _take_kv_output(self, output: ModelRunnerOutput) -> list[RequestUpdate]:
        news = self._kv.take_output(output.kv_output)
        updates = news.answers
        for request in news.arrived:
            request.num_computed_tokens = request.num_prompt_tokens
            self._learn_blocks(request, 0, request.num_prompt_tokens)
            self._set_running(request)
            self._tell_first_token(request, updates)
        for request, reason in news.lost:
            request.status = RequestStatus.WAITING
            insort(self._waiting, request, key=attrgetter("rank"))
            updates.append(self._fail(request, missing(reason)))
        return updates

    def _schedule_chunk(self, request: Request, budget: int, step: SchedulerOutput) -> int:
        """Plans the next tokens of `request`, stopping before media that are not there; returns how many."""
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + budget)
        for index in request.media_in(start, end):
            placement = self._planner.place(request, index, step)
            if placement is Placement.MISSING:
                self._news.append(self._fail(request, missing_item_error(request.media[index])))
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

    def _settle_skipped(self, request: Request, output: ModelRunnerOutput) -> RequestError | None:
        """After media failed to arrive: an item that failed to load is not in the store, so that the next
        step computes it or reports the miss; one that failed to encode fails its request, and so does one of
        which nobody knows why it is not there: the same step would be planned for ever."""
        for key in output.skipped[request.request_id]:
            if key in output.ec_output.failed_recving:
                request.in_store[key] = False
                continue
            self._planner.cache.drop(key)
            reason = output.encode_errors.get(key, "its encoder output was lost; send it again")
            return RequestError(500, "encoder_failed", reason)
        return None

    def _append_token(self, request: Request, output: ModelRunnerOutput) -> list[RequestUpdate]:
        """News of it; none yet where the answer promises KV that is still being saved."""
        token, said = output.sampled[request.request_id], output.logprobs.get(request.request_id)
        request.output_token_ids.append(token)
        logprobs = () if said is None else (said,)
        reason = self._finish_reason(request)
        update = RequestUpdate(request.request_id, (token,), reason, logprobs=logprobs)
        if reason is None:
            return [update]
        told = self._end(request, update)
        return [] if told is None else [told]

    def _finish_reason(self, request: Request) -> FinishReason | None:
        if request.output_token_ids[-1] in request.eos_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._is_full(request, len(request.output_token_ids)) else None

    def _is_full(self, request: Request, num_output_tokens: int) -> bool:
        """Whether an answer of so many tokens has the greatest length that it may have."""
        return (
            num_output_tokens >= request.sampling.max_tokens
            or request.num_prompt_tokens + num_output_tokens >= self._limits.max_model_len
        )

    def _victim(self, request: Request) -> Request:
        """Who is preempted so that `request` can go on: whoever is served last, itself at worst; rather one
        that is sure to have its media again."""
        candidates = self._running[self._running.index(request) :]
        sure = [one for one in candidates if self._planner.cache.can_repeat(one)]
        return (sure or candidates)[-1]

    def _preempt(self, request: Request) -> None:
        """By recompute: everything the request holds goes back, and it waits where its rank is."""
        log.info("preempted for lack of KV blocks", extra={"request_id": request.request_id})
        self._running.remove(request)
        self._kv.preempted(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.in_store.clear()
        request.status = RequestStatus.WAITING
        insort(self._waiting, request, key=attrgetter("rank"))

    def _fail(self, request: Request, error: RequestError) -> RequestUpdate:
        self._end(request)
        return RequestUpdate(request.request_id, error=error)

    def _end(self, request: Request, update: RequestUpdate | None = None) -> RequestUpdate | None:
        """Frees what the request holds. `update` is its end where it ended well; what of it is to be told
        now is the answer, with what the connectors have to say."""
        status, request.status = request.status, RequestStatus.FINISHED
        del self._requests[request.request_id]
        if status is RequestStatus.LOADING:
            self._kv.abandon(request)
            return None
        (self._running if status is RequestStatus.RUNNING else self._waiting).remove(request)
        self._planner.forget(request)
        if self._planner.connector is not None:
            _, params = self._planner.connector.request_finished(request)
            update = update and replace(update, ec_transfer_params=params)
        update = self._kv.finish(request, update)
        self._release(request)
        return update

    def _release(self, request: Request) -> None:
        self._pool.release(request.block_ids)
        self._planner.cache.release_all(request)
