"""Scheduling for an encode-only instance: no tokens, no KV; done means every item is in the store."""

from collections import deque

from epd_engine.core.media_planner import MediaPlanner, Placement
from epd_engine.core.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import FinishReason, Request, RequestError, RequestStatus


class EncodeScheduler:
    """Plans which items to encode and publish; a request ends once all of its items are published."""

    def __init__(self, planner: MediaPlanner):
        assert planner.connector is not None, "an encode-only instance has a connector"
        self._planner, self._connector = planner, planner.connector
        self._requests: dict[str, Request] = {}
        self._queue: deque[Request] = deque()
        self._published: dict[str, set[int]] = {}

    @property
    def num_running(self) -> int:
        return sum(r.status is RequestStatus.RUNNING for r in self._queue)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) - self.num_running

    def add(self, request: Request) -> None:
        self._planner.check_admissible(request)
        self._requests[request.request_id] = request
        self._published[request.request_id] = set()
        self._queue.append(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def schedule(self) -> SchedulerOutput:
        step = SchedulerOutput()
        self._planner.begin_step()
        for request in self._queue:
            for index in range(len(request.media)):
                if index in self._published[request.request_id]:
                    continue
                placement = self._planner.place_for_publishing(request, index, step)
                assert placement is not Placement.MISSING, "encode-only instances refuse items without pixels"
                if placement is Placement.PUBLISHED:
                    self._published[request.request_id].add(index)
                if placement is Placement.LATER:
                    break
            step.encode_requests.append(request)
            request.status = RequestStatus.RUNNING
            if placement is Placement.LATER:
                break  # first come, first served: later requests do not overtake
        step.freed_encoder_hashes = self._planner.cache.take_freed()
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
            published = self._published[request.request_id]
            error = None
            for index, item in enumerate(request.media):
                if item.mm_hash in output.ec_output.finished_sending:
                    published.add(index)
                    self._planner.cache.release(request, index)
                elif item.mm_hash in output.encode_errors:
                    error = RequestError(500, "encoder_failed", output.encode_errors[item.mm_hash])
                elif item.mm_hash in output.ec_output.failed_sending:
                    reason = output.ec_output.failed_sending[item.mm_hash]
                    error = RequestError(503, "ec_store_unavailable", reason)
            if error is not None:
                self._end(request)
                updates.append(RequestUpdate(request.request_id, error=error))
            elif len(published) == len(request.media):
                self._end(request)
                _, params = self._connector.request_finished(request)
                updates.append(
                    RequestUpdate(request.request_id, (), FinishReason.STOP, ec_transfer_params=params)
                )
        return updates

    def fail_step(self, step: SchedulerOutput, error: RequestError) -> list[RequestUpdate]:
        for request, index in step.scheduled_encoder_inputs:
            self._planner.cache.drop(request.media[index].mm_hash)
        failed = [r for r in step.encode_requests if not r.is_finished]
        for request in failed:
            self._end(request)
        return [RequestUpdate(r.request_id, error=error) for r in failed]

    def _end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self._planner.cache.release_all(request)
        self._queue.remove(request)
        del self._requests[request.request_id]
        del self._published[request.request_id]
