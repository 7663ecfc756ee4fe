"""One process: started, watched until ready, started again when it dies, stopped."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from .errors import LocalError
from .logs import LogFile, tail
from .orphans import MARK, die_with
from .plan import ProcessSpec
from .state import Phase, ProcessState

_STARTING_INTERVAL_S = 0.1
_RUNNING_INTERVAL_S = 1.0
_PROBE_TIMEOUT_S = 5.0
# Beyond the drain timeout, for a process that keeps to it and then ends by itself.
_KILL_GRACE_S = 5.0
_STEADY_S = 10.0
_LAST_WORDS_S = 1.0
_TAIL_LINES = 25


def restart_delay(failures: int) -> float:
    """Seconds to wait before the next start, after so many starts in a row that did not last."""
    return min(30.0, 0.25 * 2.0 ** min(failures, 16))


def describe_exit(status: int) -> str:
    """A return code in words."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


class StartupFailed(LocalError):
    """A process ended, or took too long, before it was ready for the first time."""

    def __init__(self, name: str, reason: str, log: list[str]) -> None:
        words = "\n".join(["its log ends with", *log]) if log else "it wrote nothing to its log"
        super().__init__(f"{name} did not start: {reason}; {words}")


class ManagedProcess:
    """Keeps one process running, and `state` true to it."""

    def __init__(
        self,
        spec: ProcessSpec,
        directory: Path,
        log: Path,
        client: httpx.AsyncClient,
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.state = ProcessState(spec.name, spec.role, spec.port)
        self.was_ready = asyncio.Event()
        self.log = log
        self._environment = {**os.environ, **spec.env, MARK: str(directory)}
        self._client = client
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled. Raises StartupFailed if the process was never ready; later it is restarted."""
        failures = 0
        while True:
            process = await self._start()
            served_s, reason = await self._watch(process)
            await self._finish_output()
            if not self.was_ready.is_set():
                raise StartupFailed(self.spec.name, reason, tail(self.log, _TAIL_LINES))
            failures = 0 if served_s >= _STEADY_S else failures + 1
            delay = restart_delay(failures)
            self.state.restarts += 1
            self.state.pid = None
            advice = f" (again and again; see `epd logs {self.spec.name}`)" if failures >= 2 else ""
            self._enter(Phase.RESTARTING, f"{reason}; next start in {delay:g} s{advice}")
            await asyncio.sleep(delay)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Ends the process: SIGTERM, the drain timeout or until `hurry`, then SIGKILL."""
        process = self._process
        if process is not None and process.returncode is None:
            self._enter(Phase.STOPPING)
            self._signal(signal.SIGTERM)
            exited, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())
            await asyncio.wait(
                {exited, hurried},
                timeout=self.spec.drain_timeout + _KILL_GRACE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            hurried.cancel()
            self._signal(signal.SIGKILL)  # also for children that outlived it
            await exited
        await self._finish_output()
        self.state.pid = None
        self._enter(Phase.STOPPED)

    async def _start(self) -> asyncio.subprocess.Process:
        self._enter(Phase.STARTING)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment,
                # Ctrl-C on the terminal is for the supervisor, which stops the processes in order.
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGKILL),
            )
        except OSError as error:
            raise StartupFailed(self.spec.name, f"{self.spec.argv[0]}: {error.strerror}", []) from None
        self.state.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = asyncio.create_task(self._keep_output(self._process.stdout))
        self._changed()
        return self._process

    async def _watch(self, process: asyncio.subprocess.Process) -> tuple[float, str]:
        """Until the process has ended: seconds since it was first ready, and why it ended."""
        deadline = time.monotonic() + self.spec.startup_timeout
        ready_at = None
        exited = asyncio.ensure_future(process.wait())
        try:
            while not exited.done():
                if await self._is_ready():
                    ready_at = ready_at or time.monotonic()
                    self.was_ready.set()
                    self._enter(Phase.READY)
                elif ready_at and not exited.done():
                    self._enter(Phase.NOT_READY)
                elif not ready_at and time.monotonic() > deadline:
                    self._signal(signal.SIGKILL)
                    await exited
                    return 0.0, f"not ready within {self.spec.startup_timeout:g} s"
                interval = _RUNNING_INTERVAL_S if ready_at else _STARTING_INTERVAL_S
                await asyncio.wait({exited}, timeout=interval)
            return time.monotonic() - (ready_at or time.monotonic()), describe_exit(exited.result())
        finally:
            exited.cancel()

    async def _is_ready(self) -> bool:
        try:
            answer = await self._client.get(
                f"{self.spec.url}{self.spec.ready_path}", timeout=_PROBE_TIMEOUT_S
            )
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    async def _keep_output(self, stream: asyncio.StreamReader) -> None:
        log = LogFile(self.log, self.spec.name)
        try:
            while data := await stream.read(1 << 16):
                log.write(data)
        finally:
            log.close()

    async def _finish_output(self) -> None:
        """Reads what is left; a grandchild that holds the pipe open must not hold up a restart."""
        if self._output is None:
            return
        await asyncio.wait({self._output}, timeout=_LAST_WORDS_S)
        self._output.cancel()
        self._output = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _enter(self, phase: Phase, note: str = "") -> None:
        if (phase, note) != (self.state.phase, self.state.note):
            self.state.phase, self.state.note = phase, note
            self._changed()
