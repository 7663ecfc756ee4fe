"""Which items go to an encoder at all: single flight for equal items, and those encoded a moment ago."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from epd_proxy.encoders import Encoders, PrimerCall
from epd_proxy.errors import EngineAnswer, Unavailable
from epd_proxy.media import MediaItem, Primed
from epd_proxy.metrics import Metrics
from epd_proxy.pool import Lease, spread

Key = bytes
Avoid = Mapping[Key, str]
"""The URL of the encoder that an item should not go to."""


class Recent:
    """Answers of the last seconds by item key, least recently used out first."""

    def __init__(
        self, size: int = 1024, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._size = size
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[Key, tuple[float, Primed]] = OrderedDict()

    def get(self, key: Key) -> Primed | None:
        until, primed = self._known.get(key, (0.0, None))
        if primed is None:
            return None
        if self._clock() >= until:
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return primed

    def put(self, key: Key, primed: Primed) -> None:
        self._known[key] = (self._clock() + self._seconds, primed)
        self._known.move_to_end(key)
        if len(self._known) > self._size:
            self._known.popitem(last=False)

    def drop(self, key: Key) -> None:
        self._known.pop(key, None)


class _Flight:
    """One primer call under way. It lives as long as somebody waits for it."""

    def __init__(self, keys: Sequence[Key], fresh: bool, task: asyncio.Task[list[Primed]]) -> None:
        self.keys = keys
        self.fresh = fresh
        self.task = task
        self.waiters = 0


class Primers:
    """Gets the primer answers for a request's items with as few encoder calls as possible."""

    def __init__(self, encoders: Encoders, metrics: Metrics, recent: Recent | None = None) -> None:
        self._encoders = encoders
        self._metrics = metrics
        self._recent = recent or Recent()
        self._flying: dict[Key, _Flight] = {}

    async def prime(
        self,
        call: PrimerCall,
        items: Sequence[MediaItem],
        keys: Sequence[Key],
        *,
        missed: Sequence[Primed] | None = None,
    ) -> list[Primed]:
        """The answer for each item, in order; `keys` tells equal items.

        `missed` are the answers that a PD could not use. With them no answer from before this call is
        trusted, but for calls of this kind, and an item goes to another encoder than the one that answered
        for it, where there is one: vLLM's believes what it has in memory to be in the store too. Raises what
        `Encoders.encode` raises, and Unavailable when no encoder is ready.
        """
        avoid = None if missed is None else {k: one.encoder for k, one in zip(keys, missed, strict=True)}
        with self._metrics.primer_wait.time():
            known = await self._obtain(call, dict(zip(keys, items, strict=True)), avoid, join=True)
        return [known[key] for key in keys]

    async def _obtain(
        self, call: PrimerCall, wanted: Mapping[Key, MediaItem], avoid: Avoid | None, *, join: bool
    ) -> dict[Key, Primed]:
        fresh = avoid is not None
        known: dict[Key, Primed] = {}
        joined: set[_Flight] = set()
        to_send: dict[Key, MediaItem] = {}
        for key, item in wanted.items():
            if fresh:
                self._recent.drop(key)
            flight = self._flying.get(key)
            if (primed := self._recent.get(key)) is not None:
                known[key] = primed
                self._metrics.recent.inc()
            elif join and flight is not None and (flight.fresh or not fresh):
                joined.add(flight)
                self._metrics.shared.inc()
            else:
                to_send[key] = item
        own = self._launch(call, to_send, avoid)
        answers, refused = await self._land(own, joined)
        known |= {key: primed for key, primed in answers.items() if key in wanted}
        if again := {key: item for key, item in wanted.items() if key in refused and key not in known}:
            known |= await self._obtain(call, again, avoid, join=False)
        return known

    def _launch(self, call: PrimerCall, items: Mapping[Key, MediaItem], avoid: Avoid | None) -> set[_Flight]:
        """Start one call for each encoder that gets a share of `items`."""
        if not items:
            return set()
        ready = self._encoders.role.pool.ready()
        if not ready:
            raise Unavailable("encoder", "is ready; requests without media are still served")
        keys = list(items)
        index_of = {instance.origin.url: index for index, instance in enumerate(ready)}
        answered = [(avoid or {}).get(key) for key in keys]
        barred = {n: index_of[url] for n, url in enumerate(answered) if url in index_of}
        shares = spread([instance.outstanding for instance in ready], len(keys), barred)
        flights = set()
        for instance, share in zip(ready, shares, strict=True):
            if share:
                mine = {keys[index]: items[keys[index]] for index in share}
                flights.add(self._take_off(call, mine, avoid is not None, Lease(instance, len(mine))))
        return flights

    def _take_off(
        self, call: PrimerCall, items: Mapping[Key, MediaItem], fresh: bool, lease: Lease
    ) -> _Flight:
        encoding = self._encoders.encode(call, tuple(items.values()), lease)
        flight = _Flight(tuple(items), fresh, asyncio.get_running_loop().create_task(encoding))
        for key in flight.keys:
            self._flying[key] = flight

        def landed(task: asyncio.Task[list[Primed]]) -> None:
            lease.release()
            if not task.cancelled() and task.exception() is None:
                for (key, item), primed in zip(items.items(), task.result(), strict=True):
                    # What lies behind a URL may change; the bytes of a data URL cannot.
                    if self._flying.get(key) is flight and not item.remote:
                        self._recent.put(key, primed)
            self._forget(flight)

        flight.task.add_done_callback(landed)
        return flight

    async def _land(
        self, own: Iterable[_Flight], joined: Iterable[_Flight]
    ) -> tuple[dict[Key, Primed], set[Key]]:
        """Answers of all flights, and the keys of others' flights that an encoder refused.

        Such a refusal may be about an item that is not ours, and names places in the other request.
        """
        flights = {flight.task: flight for flight in (*own, *joined)}
        answers: dict[Key, Primed] = {}
        refused: set[Key] = set()
        for flight in flights.values():
            flight.waiters += 1
        try:
            pending = set(flights)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    flight = flights[task]
                    error = task.exception()
                    if error is None:
                        answers |= zip(flight.keys, task.result(), strict=True)
                    elif flight in joined and isinstance(error, EngineAnswer) and error.blames_client:
                        refused.update(flight.keys)
                    else:
                        raise error
        finally:
            for flight in flights.values():
                self._leave(flight)
        return answers, refused

    def _leave(self, flight: _Flight) -> None:
        flight.waiters -= 1
        if not flight.waiters and not flight.task.done():
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: _Flight) -> None:
        for key in flight.keys:
            if self._flying.get(key) is flight:
                del self._flying[key]
