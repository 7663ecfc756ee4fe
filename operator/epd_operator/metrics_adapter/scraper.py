"""Asks pods for their metrics, and keeps what they said."""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp

from .exposition import MOST_BYTES, Exposition, read_exposition
from .pods import Pod
from .signals import pod_signals
from .window import Look, Window

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_AT_ONCE = 64


@dataclass(frozen=True)
class Pace:
    """How often pods are asked, and what their answers are good for."""

    interval_s: float = 5.0
    """Between two looks at a pod."""
    window_s: float = 15.0
    """Gauges are averaged and counters compared over so long."""
    stale_s: float = 20.0
    """A pod that was silent for so long has no metrics."""


class Scraper:
    """The last looks at each pod. One that is away, slow or lies costs one short request a round."""

    def __init__(
        self, pods: Callable[[], Iterable[Pod]], pace: Pace, asked: Callable[[bool], None] = lambda _: None
    ) -> None:
        """`asked` is told of each look whether it went well."""
        self.pace = pace
        self._pods = pods
        self._asked = asked
        self._windows: dict[str, Window] = {}
        self.rounds = 0

    def window(self, pod: Pod, now: float) -> Window | None:
        """What is known of a pod; None where it was never seen or is silent for too long."""
        window = self._windows.get(pod.uid)
        if window is None or window.at is None or now - window.at > self.pace.stale_s:
            return None
        return window

    def session(self) -> aiohttp.ClientSession:
        """For rounds: what goes to pods carries no credentials, and follows them nowhere."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE)
        return aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def run(self) -> None:
        """Asks all, again and again, until cancelled."""
        async with self.session() as session:
            while True:
                began = asyncio.get_running_loop().time()
                await self.round(session)
                self.rounds += 1
                elapsed = asyncio.get_running_loop().time() - began
                await asyncio.sleep(max(0.0, self.pace.interval_s - elapsed))

    async def round(self, session: aiohttp.ClientSession) -> None:
        """Asks all once."""
        pods = list(self._pods())
        for gone in self._windows.keys() - {pod.uid for pod in pods}:
            del self._windows[gone]
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(pod: Pod) -> None:
            async with slots:
                await self._ask(session, pod)

        await asyncio.gather(*(ask(pod) for pod in pods))

    async def _ask(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        try:
            found = await _exposition(session, pod)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._asked(False)
            log.debug("no metrics", extra={"pod": f"{pod.namespace}/{pod.name}", "error": repr(error)})
            return
        self._asked(True)
        window = self._windows.setdefault(pod.uid, Window(self.pace.window_s))
        window.add(Look(time.time(), found))


async def _exposition(session: aiohttp.ClientSession, pod: Pod) -> Exposition:
    headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
    async with session.get(pod.url, headers=headers, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                break  # refused by its length; what is left is not read
    return read_exposition(bytes(body), sources_of(pod.component))


@functools.cache
def sources_of(component: str) -> frozenset[str]:
    """The series that are read from a component's pods."""
    alternatives = [source for signal in pod_signals(component) for source in signal.sources]
    return frozenset(name for names in alternatives for name in names)
