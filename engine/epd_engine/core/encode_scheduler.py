"""Scheduling for an encode-only instance: no tokens, no KV; done means every item is in the store."""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from epd_engine.core.media_planner import MediaPlanner, Placement
from epd_engine.core.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason, Request, RequestError, RequestStatus


@dataclass
class _Progress:
    """Indices of a request's items: handed out to be saved, and known to be in the store."""

    sending: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)


class EncodeScheduler:
    """Plans which items to encode and publish; a request ends once all of its items are published.

    Saves outlive the step that begins them: the next items are encoded meanwhile, and only a step with
    nothing to encode waits.
    """

    def __init__(self, planner: MediaPlanner):
        assert planner.connector is not None, "an encode-only instance has a connector"
        self._planner, self._connector = planner, planner.connector
        self._requests: dict[str, Request] = {}
        self._queue: list[Request] = []  # those begun, then the others by rank
        self._arrivals = 0
        self._progress: dict[str, _Progress] = {}

    @property
    def num_running(self) -> int:
        # A copy of a list is made in one go: the scheduler's thread does not get in between.
        return sum(r.status is RequestStatus.RUNNING for r in tuple(self._queue))

    @property
    def num_waiting(self) -> int:
        return len(self._queue) - self.num_running

    @property
    def num_queued_tokens(self) -> int:
        return sum(item.num_embeds for request in tuple(self._queue) for item in request.media)

    @property
    def owes_kv(self) -> bool:
        return False

    def add(self, request: Request) -> None:
        self._planner.check_admissible(request)
        self._requests[request.request_id] = request
        self._progress[request.request_id] = _Progress()
        self._arrivals += 1
        request.arrival = self._arrivals
        # Who has begun goes on first, whoever comes: what it holds is free once all of it is published.
        insort(self._queue, request, lo=self.num_running, key=attrgetter("rank"))

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def schedule(self) -> SchedulerOutput:
        step = SchedulerOutput()
        self._planner.begin_step()
        for request in self._queue:
            placed_all = self._place(request, step)
            progress = self._progress[request.request_id]
            if placed_all or progress.sending or progress.published:
                step.encode_requests.append(request)
                request.status = RequestStatus.RUNNING
            if not placed_all:
                break  # in order: later requests do not overtake
        step.wait_for_saves = not (step.scheduled_encoder_inputs or step.republish_encoder_input)
        step.encoder_cache_moves = self._planner.cache.take_moves()
        step.ec_connector_metadata = self._connector.build_connector_meta()
        return step

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestUpdate]:
        self._connector.update_connector_output(output.ec_output)
        for key in output.encode_errors:
            self._planner.cache.drop(key)
        updates = []
        for request in step.encode_requests:
            if request.is_finished:
                continue  # aborted while the step ran
            error = self._take_in(request, output)
            if error is not None:
                self._end(request)
                updates.append(RequestUpdate(request.request_id, error=error))
            elif len(self._progress[request.request_id].published) == len(request.media):
                params = self._end(request)
                updates.append(
                    RequestUpdate(request.request_id, (), FinishReason.STOP, ec_transfer_params=params)
                )
        return updates

    def fail_step(self, step: SchedulerOutput, error: RequestError) -> list[RequestUpdate]:
        self._connector.update_connector_output(step.failed(str(error)))
        for request, index in step.scheduled_encoder_inputs:
            self._planner.cache.drop(request.media[index].mm_hash)
        failed = [r for r in step.encode_requests if not r.is_finished]
        for request in failed:
            self._end(request)
        return [RequestUpdate(r.request_id, error=error) for r in failed]

    def problems(self) -> list[str]:
        return self._planner.cache.problems()

    def _place(self, request: Request, step: SchedulerOutput) -> bool:
        """Hands out what there is room for, in order; whether that was all."""
        progress = self._progress[request.request_id]
        for index in range(len(request.media)):
            if index in progress.published or index in progress.sending:
                continue
            placement = self._planner.place_for_publishing(request, index, step)
            assert placement is not Placement.MISSING, "encode-only instances refuse items without pixels"
            if placement is Placement.LATER:
                return False
            (progress.published if placement is Placement.PUBLISHED else progress.sending).add(index)
        return True

    def _take_in(self, request: Request, output: ModelRunnerOutput) -> RequestError | None:
        """What a step did for a request; an error that ends it."""
        progress, ec = self._progress[request.request_id], output.ec_output
        for index in sorted(progress.sending):
            key = request.media[index].mm_hash
            if key in ec.finished_sending:
                progress.sending.discard(index)
                progress.published.add(index)
                self._planner.cache.release(request, index)
            elif key in output.encode_errors:
                return RequestError(500, "encoder_failed", output.encode_errors[key])
            elif key in ec.failed_sending:
                return RequestError(503, "ec_store_unavailable", ec.failed_sending[key])
        return None

    def _end(self, request: Request) -> Mapping[str, Any] | None:
        request.status = RequestStatus.FINISHED
        self._planner.cache.release_all(request)
        self._queue.remove(request)
        del self._requests[request.request_id]
        del self._progress[request.request_id]
        _, params = self._connector.request_finished(request)
        return params
