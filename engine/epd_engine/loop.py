"""The engine's thread: the server hands requests in and gets news out, and never waits for a step."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from epd_engine.core.output import RequestUpdate
from epd_engine.core.request import Request, RequestError
from epd_engine.engine import Engine

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0  # how often an idle loop shows that it lives, and lets connectors look after their stores
STALLED_SECONDS = 0.005  # until work that had no room is tried again
GATHER_SECONDS = 0.02  # at most, that an idle engine with a request waits for others that are on their way
ARRIVAL_SECONDS = 0.001  # until it is asked again whether any still are


class EngineLoop:
    """Runs an `Engine` in a thread of its own. Public methods are for the event loop's thread."""

    def __init__(self, make_engine: Callable[[], Engine]):
        """`make_engine` loads the weights; it is called in the loop's thread."""
        self._make_engine = make_engine
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._outboxes: dict[str, asyncio.Queue[RequestUpdate]] = {}
        self._num_arriving = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._heartbeat = time.monotonic()
        self.engine: Engine | None = None
        self.failure: BaseException | None = None

    def start(self, on_failure: Callable[[], None]) -> None:
        """Starts loading; `on_failure` is called in the event loop when the thread ends by an error."""
        self._asyncio = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._thread.start()

    @property
    def is_loading(self) -> bool:
        """It has been started, and has neither an engine yet nor a reason why not."""
        return self._thread.is_alive() and self.engine is None and self.failure is None

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self.failure is None

    async def wait_ready(self) -> Engine:
        """The engine once its weights are in and a smoke run has passed."""
        await self._ready.wait()
        assert self.engine is not None
        return self.engine

    @property
    def is_alive(self) -> bool:
        """The thread runs; while loading or in a long step its heartbeat may be old."""
        return self._thread.is_alive() and self.failure is None

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round."""
        return time.monotonic() - self._heartbeat

    @property
    def num_requests(self) -> int:
        return len(self._outboxes)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Meanwhile a request is made ready that is handed in next. An idle engine waits for it a moment: of
        many that come at once, the first would have a step to itself while all others wait."""
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    async def updates(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """News of `request` until its end. Closing the iterator early aborts the request."""
        if not self.is_alive:  # it ended while the request was made ready: nobody will take it
            yield RequestUpdate(request.request_id, error=_shutting_down())
            return
        outbox: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        self._outboxes[request.request_id] = outbox
        self._inbox.put(lambda engine: self._add(engine, request))
        finished = False
        try:
            while not finished:
                update = await outbox.get()
                finished = update.is_last
                yield update
        finally:
            del self._outboxes[request.request_id]
            if not finished:
                self._inbox.put(lambda engine: engine.abort(request.request_id))

    def end_all(self) -> None:
        """Ends every request with an error, and frees it: there is no time left."""
        for request_id in self._outboxes:
            self._inbox.put(partial(Engine.abort, request_id=request_id))
        self._fail_all()

    @property
    def owes_kv(self) -> bool:
        """Whether a peer may still come for KV that answers have promised."""
        return self.is_ready and self.engine is not None and self.engine.scheduler.owes_kv

    def fail(self, error: BaseException) -> None:
        """Something that requests need besides the engine cannot be had: as if its thread had ended by it."""
        self.failure = error
        self._fail_all()
        self._on_failure()

    def join(self) -> None:
        """Waits for the thread's end."""
        self._thread.join()

    async def stop(self) -> None:
        """Ends the thread after its current step; unfinished requests get an error. While it loads, nothing
        reaches it: it is left alone."""
        self._inbox.put(None)
        if not self.is_loading:
            await asyncio.to_thread(self.join)

    # The engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            engine.smoke()
            engine.on_progress(lambda: self._inbox.put(lambda _: None))
            self.engine = engine
            self._call(self._ready.set)
            self._serve(engine)
            engine.shutdown()
        except BaseException as error:  # noqa: BLE001 - reported to the server, which ends the process
            self.failure = error
            self._call(self._on_failure)
        finally:
            self._call(self._fail_all)

    def _serve(self, engine: Engine) -> None:
        while True:
            self._heartbeat = time.monotonic()
            if not self._take_inbox(engine):
                return
            self._publish(engine.step())

    def _take_inbox(self, engine: Engine) -> bool:
        """Runs what has come in, waiting for it only when there is nothing else to do. False: stop."""
        is_idle = not engine.has_work
        wait = IDLE_SECONDS if is_idle else STALLED_SECONDS
        try:
            command = self._inbox.get(block=is_idle or engine.is_stalled, timeout=wait)
            until = time.monotonic() + GATHER_SECONDS if is_idle else 0.0
            while command is not None:
                command(engine)
                command = self._next(until)
        except queue.Empty:
            return True
        return False

    def _next(self, until: float) -> Callable[[Engine], None] | None:
        """Raises `queue.Empty`, not before `until` while requests are on their way."""
        while self._num_arriving and time.monotonic() < until:
            try:
                return self._inbox.get(timeout=ARRIVAL_SECONDS)
            except queue.Empty:
                pass  # or it was refused
        return self._inbox.get_nowait()

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except RequestError as error:
            self._publish([RequestUpdate(request.request_id, error=error)])
        except Exception:  # what a store or a connector raises at one request must not end the others
            log.exception("request %s could not be taken", request.request_id)
            failed = RequestError(500, "internal_error", "the engine failed on this request; see its log")
            self._publish([RequestUpdate(request.request_id, error=failed)])

    def _publish(self, updates: list[RequestUpdate]) -> None:
        if updates:
            self._call(self._deliver, updates)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._asyncio is not None
        try:
            self._asyncio.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.info("the event loop has ended before the engine")

    # Back in the event loop's thread

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if outbox := self._outboxes.get(update.request_id):
                outbox.put_nowait(update)

    def _fail_all(self) -> None:
        for request_id in self._outboxes:
            self._deliver([RequestUpdate(request_id, error=_shutting_down())])


def _shutting_down() -> RequestError:
    return RequestError(503, "shutting_down", "the instance is shutting down; try another")
