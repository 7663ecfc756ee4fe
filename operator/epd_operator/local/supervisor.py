"""All processes of one deployment, from start to stop."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from .plan import Plan
from .process import ManagedProcess
from .progress import Progress
from .rundir import RunDirectory
from .state import DeploymentState, Phase, write_state

_TICK_S = 0.2


class StopRequest:
    """Ctrl-C, SIGTERM or a closed terminal: the first asks for an orderly stop, a second one hurries it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        """One more signal has come."""
        (self.hurry if self.asked.is_set() else self.asked).set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Signals come here while inside."""
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Under nohup a closed terminal is to be ignored.
        numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


class Supervisor:
    """Runs a plan: start all, say when all is ready, keep them running, stop all.

    `ready` is called once, when every process has been ready.
    """

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        progress: Progress,
        ready: Callable[[DeploymentState], None],
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._progress = progress
        self._ready = ready
        self._processes: list[ManagedProcess] = []
        self.state = DeploymentState(
            plan.name,
            plan.model,
            plan.address,
            os.getpid(),
            str(directory.path),
            plan.places.storage,
            memory=plan.places.memory,
        )

    async def run(self, stop: StopRequest) -> bool:
        """Until `stop` is asked for; whether all was ready before that.

        Raises StartupFailed if a process does not come up. All processes have ended afterwards,
        however this ends.
        """
        self._directory.logs.mkdir()
        async with httpx.AsyncClient(trust_env=False) as client:
            self._processes = [
                ManagedProcess(
                    spec,
                    self._directory.path,
                    self._directory.logs / f"{spec.name}.log",
                    client,
                    self._changed,
                )
                for spec in self._plan.processes
            ]
            self.state.processes = [process.state for process in self._processes]
            running = [asyncio.create_task(process.run()) for process in self._processes]
            try:
                return await self._serve(client, running, stop)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await self._stop(stop.hurry)

    async def _serve(
        self, client: httpx.AsyncClient, running: list[asyncio.Task[None]], stop: StopRequest
    ) -> bool:
        asked = asyncio.create_task(_set(stop.asked))
        all_ready = asyncio.create_task(self._all_ready(client))
        try:
            while not (all_ready.done() or asked.done()):
                waited_for = [*running, asked, all_ready]
                await asyncio.wait(waited_for, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                _raise_failure(running)
                self._progress.update(self.state)
            if not all_ready.done():
                return False
            self.state.phase = Phase.READY
            self._changed()
            self._ready(self.state)
            await asyncio.wait([*running, asked], return_when=asyncio.FIRST_COMPLETED)
            _raise_failure(running)
            return True
        finally:
            asked.cancel()
            all_ready.cancel()

    async def _all_ready(self, client: httpx.AsyncClient) -> None:
        for process in self._processes:
            await process.was_ready.wait()
        while not await self._proxy_sees_all(client):  # noqa: ASYNC110 - no event comes from a process
            await asyncio.sleep(_TICK_S)

    async def _proxy_sees_all(self, client: httpx.AsyncClient) -> bool:
        """Whether the proxy, which asks the engines now and then, has found each of them ready. It is ready
        itself, for text, without encoders."""
        try:
            answer = await client.get(f"{self._processes[-1].spec.url}/ready")
            roles = answer.json()["roles"]
        except (httpx.TransportError, ValueError, KeyError):
            return False
        return all(instance["ready"] for instances in roles.values() for instance in instances)

    async def _stop(self, hurry: asyncio.Event) -> None:
        """The proxy first: it finishes its requests while the engines are there."""
        self.state.phase = Phase.STOPPING
        *engines, proxy = self._processes
        await proxy.stop(hurry)
        await asyncio.gather(*(engine.stop(hurry) for engine in engines))
        self.state.phase = Phase.STOPPED
        self._changed()

    def _changed(self) -> None:
        try:
            write_state(self._directory.state, self.state)
            self._progress.update(self.state)
        except OSError:
            # A full disk is no reason to stop serving; the next change is written again.
            pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()
