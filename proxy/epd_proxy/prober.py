"""Probes: one loop for each instance decides whether it gets traffic."""

from __future__ import annotations

import asyncio

from epd_proxy import logs
from epd_proxy.http1 import Client, Reply, UpstreamError
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Instance
from epd_proxy.upstream import Role

UP_SECONDS = 2.0
DOWN_SECONDS = 0.25
PROBE_TIMEOUT = 2.0
_MAX_ANSWER = 1 << 20


class Prober:
    """Keeps every instance of some roles probed, from the first round at start until the end."""

    def __init__(self, roles: tuple[Role, ...], metrics: Metrics) -> None:
        self._roles = roles
        self._metrics = metrics
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe everything once, so that the first request finds its instances, and go on probing."""
        everything = [(role, instance) for role in self._roles for instance in role.pool]
        await asyncio.gather(*(self._probe(role, instance) for role, instance in everything))
        self._loops = [asyncio.create_task(self._watch(*one)) for one in everything]

    def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()

    async def _watch(self, role: Role, instance: Instance) -> None:
        while instance in role.pool:
            if instance.ready:
                await _within(UP_SECONDS, instance.trouble)
            else:
                await asyncio.sleep(DOWN_SECONDS)
            instance.trouble.clear()
            await self._probe(role, instance)

    async def _probe(self, role: Role, instance: Instance) -> None:
        failures, before = instance.failures, instance.ready
        ready, reason = await probe(role.client, instance)
        role.pool.probed(instance, failures, ready, reason)
        self._metrics.instances_ready.labels(role.name).set(len(role.pool.ready()))
        if instance.ready != before:
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
