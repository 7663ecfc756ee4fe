"""Asks the janitors how full their stores are: beside reconciling, which only reads what was last heard."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from ..apply.kinds import POD
from ..render import selector
from ..render.affinity import JANITOR
from ..render.pods import PORT
from ..status.pods import is_current
from ..status.usage import MOST_BYTES, Usage, read_usage, reported
from .cache import Cache, Key
from .metrics import Metrics

Object = dict[str, Any]
log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_AT_ONCE = 16


class UsagePoller:
    """Keeps the last usage of each resource's store. `changed` is called for a resource with news.

    A janitor that is away, slow or lies costs one short request a round, and its store's last usage stays.
    """

    def __init__(
        self, cache: Cache, metrics: Metrics, interval_s: float, changed: Callable[[Key], None]
    ) -> None:
        self._cache = cache
        self._metrics = metrics
        self._interval_s = interval_s
        self._changed = changed
        self._latest: dict[Key, Usage] = {}

    def latest(self, key: Key) -> Usage | None:
        """What was last heard of a resource's store."""
        return self._latest.get(key)

    async def run(self) -> None:
        """Asks all, again and again, until cancelled."""
        # A session of its own: what goes to pods carries no credentials, and follows them nowhere.
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=_AT_ONCE, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                await self._round(session)
                await asyncio.sleep(self._interval_s)

    async def _round(self, session: aiohttp.ClientSession) -> None:
        keys = list(self._cache.resources())
        for gone in self._latest.keys() - set(keys):
            del self._latest[gone]
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(key: Key) -> None:
            async with slots:
                await self._ask(session, key)

        await asyncio.gather(*(ask(key) for key in keys))

    async def _ask(self, session: aiohttp.ClientSession, key: Key) -> None:
        try:
            address = _address(key, self._cache.of_kind(key, POD))
            if address is None:
                return
            self._latest[key] = await _usage(session, address)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._metrics.usage_looks.labels("failed").inc()
            log.debug("store usage not known", extra={"resource": str(key), "error": repr(error)})
            return
        except Exception:
            # Whatever it is, it is no reason for the operator to end.
            self._metrics.usage_looks.labels("failed").inc()
            log.exception("store usage not known", extra={"resource": str(key)})
            return
        self._metrics.usage_looks.labels("ok").inc()
        resource = self._cache.resource(key)
        if resource is not None:
            before = resource.get("status", {}).get("store")
            if reported(before, self._latest[key]) != before:
                self._changed(key)


def _address(key: Key, pods: list[Object]) -> str | None:
    """Where the janitor of a resource listens; None where none runs."""
    wanted = selector(key.name, JANITOR)
    for pod in pods:
        address = pod.get("status", {}).get("podIP")
        if address and is_current(pod) and wanted.items() <= pod["metadata"].get("labels", {}).items():
            return f"[{address}]" if ":" in address else str(address)
    return None


async def _usage(session: aiohttp.ClientSession, address: str) -> Usage:
    headers = {"Accept-Encoding": "identity"}
    url = f"http://{address}:{PORT}/usage"
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MOST_BYTES:
                break  # refused by its length; what is left is not read
        return read_usage(bytes(body))
