"""The end of an instance: what has begun is finished, for as long as there is time."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

LAST_WORDS_SECONDS = 2.0
"""For clients to read how their answers end; one that reads nothing is cut off then."""
IDLE_SECONDS = 0.5
"""How often connections are closed on which nothing is asked."""


class Drain:
    """Begins when somebody tells the instance to end; is over `seconds` later, or when told once more."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self.on_over: Callable[[], None] = lambda: None
        """Called once, in the event loop: whoever is not done gets an error now."""

    def tell(self) -> None:
        """One more signal has come; for the event loop's thread."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.on_over()


class DrainingServer(uvicorn.Server):
    """Told to end, it takes no more connections at once, and ends when those that it has are done.

    uvicorn by itself cuts off what is not done in time, and does not heed a second SIGTERM.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain):
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._told_to_end)

    def cut_off_later(self) -> None:
        """Cancels what is still under way after a moment, for an end that nobody reads."""
        assert self._loop is not None
        self._loop.call_later(LAST_WORDS_SECONDS, self._cut_off)

    def _told_to_end(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            self._close_idle()
        self._drain.tell()

    def _close_idle(self) -> None:
        """uvicorn looks once; a connection that was accepted just then would be waited for."""
        assert self._loop is not None
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        self._loop.call_later(IDLE_SECONDS, self._close_idle)

    def _cut_off(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        for task in tuple(self.server_state.tasks):
            task.cancel()
