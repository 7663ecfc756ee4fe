"""The instances of a role, and which of them takes the next piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from epd_proxy.config import Origin


@dataclass(eq=False)
class Instance:
    """One engine process. `outstanding` is the work it holds: requests, or items of an encoder."""

    origin: Origin
    ready: bool = False
    reason: str = "not probed yet"
    outstanding: int = 0
    failures: int = 0
    """Counts lost connections, so that a probe begun before one cannot declare the instance ready."""
    trouble: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when a connection was lost, or the instance removed: whoever probes need not wait."""


class Pool:
    """A role's instances. Whoever lists them (flags, or discovery) calls `add` and `remove`.

    `added` is called with each instance that is new.
    """

    def __init__(self, role: str, origins: Sequence[Origin] = ()) -> None:
        self.role = role
        self.added: Callable[[Instance], None] = lambda instance: None
        self._instances: dict[str, Instance] = {}
        for origin in origins:
            self.add(origin)

    def add(self, origin: Origin) -> Instance:
        known = self._instances.get(origin.url)
        if known is not None:
            return known
        instance = self._instances[origin.url] = Instance(origin)
        self.added(instance)
        return instance

    def remove(self, origin: Origin) -> None:
        """No new work for this instance, while what it has in flight goes on.

        It is final: an instance added later under the same address is another one.
        """
        gone = self._instances.pop(origin.url, None)
        if gone is not None:
            gone.ready, gone.reason = False, "removed"
            gone.trouble.set()

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, instance: Instance) -> bool:
        return self._instances.get(instance.origin.url) is instance

    def ready(self, exclude: Collection[Instance] = ()) -> list[Instance]:
        """Instances that may get traffic, in the order they were given."""
        return [one for one in self._instances.values() if one.ready and one not in exclude]

    def pick(self, exclude: Collection[Instance] = (), avoid: Collection[Instance] = ()) -> Instance | None:
        """The ready instance with the least outstanding work; the first given of several equal ones.

        One to `avoid` is taken only where there is no other.
        """
        return min(self.ready(exclude), key=lambda one: (one in avoid, one.outstanding), default=None)

    def lost(self, instance: Instance, reason: str) -> None:
        """A connection failed: no traffic until a probe that starts from now on succeeds."""
        instance.failures += 1
        instance.trouble.set()
        instance.ready, instance.reason = False, reason

    def probed(self, instance: Instance, failures: int, ready: bool, reason: str) -> None:
        """A probe's result; `failures` is the count when it began, so that an old result changes nothing."""
        if instance in self and instance.failures == failures:
            instance.ready, instance.reason = ready, reason


class Lease:
    """Work of `size` on an instance, counted from the moment of choice until its release."""

    def __init__(self, instance: Instance, size: int = 1) -> None:
        self.instance = instance
        self.size = size
        instance.outstanding += size

    def move(self, instance: Instance) -> None:
        """The work goes to another instance."""
        self.release()
        self.instance = instance
        instance.outstanding += self.size

    def release(self) -> None:
        """Exactly once at the end."""
        self.instance.outstanding -= self.size


def spread(loads: Sequence[int], count: int, avoid: Mapping[int, int] | None = None) -> list[list[int]]:
    """Indices 0..count-1 over instances with `loads` outstanding items, each to the least loaded.

    One list of ascending indices for each instance; ties go to the first instance. `loads` is not empty.
    `avoid` names the instance that an index goes to only where there is no other.
    """
    avoid = avoid or {}
    shares: list[list[int]] = [[] for _ in loads]
    for index in range(count):
        others = [i for i in range(len(loads)) if i != avoid.get(index)]
        least = min(others or range(len(loads)), key=lambda i: loads[i] + len(shares[i]))
        shares[least].append(index)
    return shares
