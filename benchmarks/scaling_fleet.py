"""Replicas of a role as a fluid: between two events everything in a replica goes on at a constant pace.

A replica does one thing in front (an item through the tower, or a prompt in chunks) while the requests that
decode get one token a step. So a step is long while a picture is encoded beside it, and a little longer while
a chunk is: that is what disaggregation takes away, and what its replicas cost in exchange is counted too.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from scaling_trace import Arrival


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds, of one replica; `service_times.py` measures them."""

    encode_token: float
    """Of media, in the tower."""
    prefill_token: float
    step: float
    """A decode step of nothing."""
    step_request: float
    """Each request in it."""
    chunk: int = 512
    """Tokens that a step computes at most."""
    seats: int = 16
    """Requests that decode at once."""


@dataclass(eq=False)
class Job:
    """A request in one stage, or in its only one: seconds in the tower, tokens of prompt and answer."""

    arrival: Arrival
    encode_seconds: float
    prompt: int
    output: int
    given: float = 0.0
    first_token: float = math.inf
    finished: float = math.inf


@dataclass(eq=False)
class Replica:
    """`ready` and `stopped` are times; a replica that drains takes nothing more and ends when it is empty."""

    times: ServiceTimes
    ready: float
    begun: float
    now: float = 0.0
    draining: bool = False
    stopped: float = math.inf
    busy: float = 0.0
    _waiting: deque[Job] = field(default_factory=deque)
    _decoding: list[Job] = field(default_factory=list)
    _front: list[tuple[float, float]] = field(default_factory=list)
    """What is left of the work in front: (seconds, steps in them) for each part."""

    @property
    def jobs(self) -> int:
        return len(self._waiting) + len(self._decoding)

    @property
    def queued_encode_seconds(self) -> float:
        return sum(job.encode_seconds for job in self._waiting)

    def add(self, job: Job, now: float) -> list[Job]:
        """Jobs that finished until `now`."""
        done = self.advance(now)
        self._waiting.append(job)
        self._begin_front()
        return done

    def next_event(self) -> float:
        """When something ends, if nothing comes."""
        waits = [self._front[0][0]] if self._front else []
        if self._decoding:
            fewest = min(job.output - job.given for job in self._decoding)
            waits.append(fewest / self._pace())
        return self.now + max(1e-9, min(waits)) if waits else math.inf

    def advance(self, now: float) -> list[Job]:
        done: list[Job] = []
        while self.now < now:
            end = min(now, self.next_event())
            self._go_on(end - self.now)
            self.now = end
            done += self._settle()
        return done

    def _pace(self) -> float:
        """Tokens a second that each decoding request gets."""
        if self._front:
            seconds, steps = self._front[0]
            return steps / seconds
        return 1 / (self.times.step + self.times.step_request * len(self._decoding))

    def _go_on(self, seconds: float) -> None:
        if self._front or self._decoding:
            self.busy += seconds
        if self._decoding:
            tokens = self._pace() * seconds
            for job in self._decoding:
                job.given += tokens
        if self._front:
            left, steps = self._front[0]
            self._front[0] = (left - seconds, steps * (left - seconds) / left)

    def _settle(self) -> list[Job]:
        done = [job for job in self._decoding if job.given >= job.output - 1e-6]
        if done:
            self._decoding = [job for job in self._decoding if job not in done]
        if self._front and self._front[0][0] <= 1e-9:
            del self._front[0]
            if not self._front:
                job = self._waiting.popleft()
                job.first_token, job.given = self.now, 1.0
                if job.output > 1:
                    self._decoding.append(job)
                else:
                    done.append(job)
        self._begin_front()
        for job in done:
            job.finished = self.now
        return done

    def _begin_front(self) -> None:
        """The next job's work, if it has a seat. Its steps serve those that decode as well."""
        if self._front or not self._waiting or len(self._decoding) >= self.times.seats:
            return
        job, times = self._waiting[0], self.times
        step = times.step + times.step_request * len(self._decoding)
        if job.encode_seconds:
            self._front.append((job.encode_seconds + (step if self._decoding else 0), 1.0))
        if job.prompt:
            steps = math.ceil(job.prompt / times.chunk)
            self._front.append((job.prompt * times.prefill_token + steps * step, float(steps)))


@dataclass(eq=False)
class Fleet:
    """The replicas of one role."""

    times: ServiceTimes
    start_seconds: float
    replicas: list[Replica] = field(default_factory=list)
    retired: list[Replica] = field(default_factory=list)

    def scale(self, wanted: int, now: float) -> None:
        """Starts replicas, or lets those with the least to do drain."""
        serving = [replica for replica in self.replicas if not replica.draining]
        for _ in range(wanted - len(serving)):
            self.replicas.append(Replica(self.times, now + self.start_seconds, now, now))
        # Those that start go first, then those with the least to do.
        for replica in sorted(serving, key=lambda one: (one.ready <= now, one.jobs))[: len(serving) - wanted]:
            replica.draining = True
        self.retire(now)

    def retire(self, now: float) -> None:
        for replica in [one for one in self.replicas if one.draining and not one.jobs]:
            replica.stopped = now
            self.replicas.remove(replica)
            self.retired.append(replica)

    def size(self) -> int:
        return sum(not replica.draining for replica in self.replicas)

    def ready(self, now: float) -> list[Replica]:
        return [one for one in self.replicas if not one.draining and one.ready <= now]

    def choose(self, now: float) -> Replica:
        """Least outstanding; there is always one, since the last is not scaled away."""
        return min(self.ready(now) or self.replicas, key=lambda replica: replica.jobs)

    def replica_seconds(self, begin: float, end: float) -> float:
        everyone = self.replicas + self.retired
        return sum(max(0.0, min(one.stopped, end) - max(one.begun, begin)) for one in everyone)
