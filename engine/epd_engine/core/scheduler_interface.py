"""What a scheduler is, whatever it schedules."""

from typing import Protocol

from epd_engine.core.output import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from epd_engine.core.request import Request, RequestError


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

    @property
    def num_queued_tokens(self) -> int:
        """Tokens still to be computed before first answers: of prompts, or where there are none of media.
        May be asked for in any thread."""

    @property
    def owes_kv(self) -> bool:
        """Whether a peer may still pull KV of a request that has ended. May be asked for in any thread."""
