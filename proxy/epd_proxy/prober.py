"""Probes: one loop for each instance decides whether it gets traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from epd_proxy import logs
from epd_proxy.http1 import Client, Reply, UpstreamError
from epd_proxy.pool import Instance
from epd_proxy.upstream import Role

UP_SECONDS = 2.0
DOWN_SECONDS = 0.25
PROBE_TIMEOUT = 2.0
_MAX_ANSWER = 1 << 20


class Prober:
    """Keeps every instance of some roles probed, from the first round at start until the end.

    An instance that is added later is probed at once, and then like the others.
    """

    def __init__(self, roles: tuple[Role, ...]) -> None:
        self._roles = roles
        self._loops: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Probe everything once, so that the first request finds its instances, and go on probing."""
        everything = [(role, instance) for role in self._roles for instance in role.pool]
        await asyncio.gather(*(self._probe(role, instance) for role, instance in everything))
        for one in everything:
            self._keep(self._watch(*one))
        for role in self._roles:
            role.pool.added = partial(self._added, role)

    def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()

    def _added(self, role: Role, instance: Instance) -> None:
        self._keep(self._probe_and_watch(role, instance))

    def _keep(self, loop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(loop)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)

    async def _probe_and_watch(self, role: Role, instance: Instance) -> None:
        await self._probe(role, instance)
        await self._watch(role, instance)

    async def _watch(self, role: Role, instance: Instance) -> None:
        while instance in role.pool:
            if instance.ready:
                await _within(UP_SECONDS, instance.trouble)
            else:
                await asyncio.sleep(DOWN_SECONDS)
            instance.trouble.clear()
            if instance in role.pool:
                await self._probe(role, instance)

    async def _probe(self, role: Role, instance: Instance) -> None:
        failures, before = instance.failures, instance.ready
        ready, reason = await probe(role.client, instance)
        role.pool.probed(instance, failures, ready, reason)
        if instance in role.pool and instance.ready != before:
            logs.info(
                "instance",
                role=role.name,
                url=instance.origin.url,
                ready=instance.ready,
                reason=instance.reason,
            )


async def _within(seconds: float, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


async def probe(client: Client, instance: Instance) -> tuple[bool, str]:
    """Ask an instance's `/ready`, or `/health` where it has no such path, as vLLM; and why not ready."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            for path in ("/ready", "/health"):
                with await client.request(instance.origin, "GET", path, []) as reply:
                    await _drain(reply)
                    if reply.status == 200:
                        return True, "ready"
                    if reply.status != 404:
                        break
            return False, f"{path} answers {reply.status}"
    except TimeoutError:
        return False, f"no answer within {PROBE_TIMEOUT:g} s"
    except UpstreamError as error:
        return False, str(error)


async def _drain(reply: Reply) -> None:
    await reply.read(_MAX_ANSWER)
