"""The proxy as a server, and how it ends: what has begun is finished, for as long as there is time."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from epd_proxy.app import Proxy
from epd_proxy.config import Config

KEEP_ALIVE = 75
"""Seconds; longer than common clients keep idle connections, so that none is closed under a request."""
LAST_WORDS = 2.0
"""Seconds for clients to read how their answers end; one that reads nothing is cut off then."""
IDLE = 0.5
"""Seconds between two looks at connections on which nothing is asked."""


class Server(uvicorn.Server):
    """Told to end, it takes no more connections at once, and ends when those that it has are done.

    After `--drain-timeout`, or told once more, what is left ends with the error `shutting_down`: uvicorn by
    itself does not heed a second SIGTERM.
    """

    def __init__(self, proxy: Proxy, config: Config) -> None:
        super().__init__(
            uvicorn.Config(
                proxy,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
            )
        )
        self._drain = config.limits.drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._told_to_end)

    def _told_to_end(self) -> None:
        assert self._loop is not None
        if self.should_exit:
            self._end_all()
            return
        self.should_exit = True
        self._close_idle()
        self._loop.call_later(self._drain, self._end_all)

    def _close_idle(self) -> None:
        """uvicorn looks once; a connection that was accepted just then would be waited for."""
        assert self._loop is not None
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
        self._loop.call_later(IDLE, self._close_idle)

    def _end_all(self) -> None:
        """A request that is cancelled tells its client."""
        assert self._loop is not None
        self._cancel_all()
        self._loop.call_later(LAST_WORDS, self._cut_off)

    def _cut_off(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        self._cancel_all()

    def _cancel_all(self) -> None:
        for task in tuple(self.server_state.tasks):
            task.cancel()
