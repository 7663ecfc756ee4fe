"""One form of the store under chaos: its volumes, its crew, its janitor, what is done to them, and what must
hold all the time and at the end."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import store_audit as audit
from tests.support.store_faults import Fault, Volume, schedule
from tests.support.store_items import MAX_ENTRY_BYTES, Items
from tests.support.store_processes import HANG_SECONDS, Janitor, Member, fork_server
from tests.support.store_workers import DELETED_UNDER_LEASE, MET_DAMAGE, Post

GID = 54000  # the volume's group; no process has it as its own
GRACE = 2.0
LEASE_SECONDS = 4.0
REFILL_SECONDS = 0.2


@dataclass(frozen=True)
class Form:
    """Numbers of one variant: processes, items, faults a minute, and the budget of files in bytes."""

    name: str
    connector: str
    writers: int
    readers: int
    items: int
    rates: dict[str, float]
    budget: int = 0
    holds: bool = False


@dataclass
class Chaos:
    form: Form
    seed: int
    seconds: float
    control: Path
    extra: Callable[[int], dict[str, Any]]
    """The connector's extra config of the nth writer or reader."""
    files: Volume | None = None
    memory: Volume | None = None
    first_uid: int = 54100
    complaints: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0
    samples: int = 0
    _undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _full: list[tuple[float, Volume]] = field(default_factory=list)
    _ended: float = 0.0
    _reports: list[tuple[tuple[int, int], float]] = field(default_factory=list)
    _disturbed: list[float] = field(default_factory=list)  # when a writer was killed or stopped, or went on

    def __post_init__(self) -> None:
        context = fork_server()
        self.control.mkdir()
        self.volumes = [volume for volume in (self.files, self.memory) if volume is not None]
        self.crew = [Member(self._post(n), context, self.complain) for n in range(self._size)]
        self.janitor = self._janitor()
        self.faults: list[Fault] = schedule(f"{self.seed}/{self.form.name}", self.seconds, self.form.rates)

    @property
    def _size(self) -> int:
        return self.form.writers + self.form.readers

    def _post(self, n: int) -> Post:
        writes = n < self.form.writers
        name = f"{self.form.name}-{'writer' if writes else 'reader'}-{n}"
        return Post(
            name=name,
            role="ec_producer" if writes else "ec_consumer",
            connector=self.form.connector,
            extra=self.extra(n),
            items=Items(self.seed, self.form.items),
            seed=f"{self.seed}/{name}",
            uid=self.first_uid + n,
            gid=GID,
            control=self.control,
            holds=self.form.holds and not writes,
        )

    def _janitor(self) -> Janitor:
        arguments = ["--interval", "0.5", "--grace", str(GRACE), "--scrub", str(8 << 20)]
        if self.files is not None:
            arguments += ["--path", str(self.files.root), "--capacity", str(self.form.budget)]
            arguments += ["--high-water", "0.9", "--low-water", "0.7"]
        if self.memory is not None:
            arguments += ["--memory-path", str(self.memory.root)]
        name = f"{self.form.name}-janitor"
        uid = self.first_uid + self._size
        return Janitor(name, arguments, uid, GID, self.control / f"{name}.log", self.complain)

    def complain(self, what: str, who: str, **more: Any) -> None:
        self.complaints.append({"what": what, "who": who, "at": time.monotonic(), **more})

    # While it runs

    def start(self) -> None:
        for member in self.crew:
            member.start()
        self.began = time.monotonic()

    def tick(self) -> None:
        """Does what is due, follows up what died, and measures."""
        now = time.monotonic()
        while self.faults and self.faults[0].at <= now - self.began:
            self._strike(self.faults.pop(0), now)
        for due, undo in [entry for entry in self._undo if entry[0] <= now]:
            undo()
            self._undo.remove((due, undo))
        for until, volume in self._full:
            volume.fill() if until > now else volume.empty()
        self._full = [entry for entry in self._full if entry[0] > now]
        for member in self.crew:
            member.look_after(now)
        self.janitor.look_after()
        if self.files is not None:
            self._measure(self.files.root)

    def _strike(self, fault: Fault, now: float) -> None:
        member = self.crew[int(fault.pick * self._size)]
        volume = self.volumes[int(fault.pick * 1009) % len(self.volumes)]
        until = now + fault.lasting
        if fault.kind in ("kill", "stop"):
            self._disturbed += [now, until]
        if fault.kind == "kill":
            member.kill()
        elif fault.kind == "stop":
            self._undo.append((until, member.stop()))
        elif fault.kind == "kill-janitor":
            self.janitor.kill()
        elif fault.kind == "stop-janitor":
            self._undo.append((until, self.janitor.stop()))
        elif fault.kind == "full":
            self._full.append((until, volume))
        elif fault.kind == "forbid":
            self._undo.append((until, volume.forbid(fault.pick)))
        else:
            assert fault.kind == "flip", fault
            volume.flip(fault.pick)

    def _measure(self, root: Path) -> None:
        """The budget may be exceeded by one entry a writer: those alive, and those that came since the report
        before the last, which no number of the janitor's knows yet."""
        report = audit.report_of(root)
        if report is None:
            return
        now = time.monotonic()
        if not self._reports or self._reports[-1][0] != report.number:
            self._reports = [*self._reports[-2:], (report.number, now)]
        since = self._reports[0][1] - 1.0
        writers = self.crew[: self.form.writers]
        allowed = sum(1 + sum(start >= since for start in writer.starts[1:]) for writer in writers)
        self.samples += 1
        for _ in range(3):  # files that come and go under the walk may be counted twice; not three times
            alive = {writer.pid for writer in writers if writer.is_alive}
            found = audit.walk(root, alive)
            over = found.total - found.hidden - self.form.budget
            if over <= allowed * MAX_ENTRY_BYTES:
                self.peak = max(self.peak, found.total)
                return
        self.complain(
            "the budget is exceeded", "the store", over=over, allowed=allowed * MAX_ENTRY_BYTES,
            found=vars(found), report=vars(report),
        )  # fmt: skip

    # At the end

    def finish(self) -> None:
        """Faults end, then every process ends by itself, within bounds."""
        self._ended = time.monotonic()
        for _, undo in self._undo:
            undo()
        for volume in self.volumes:
            volume.restore()
        self.janitor.look_after()
        (self.control / "end").touch()
        deadline = time.monotonic() + 2 * HANG_SECONDS
        while any(member._process is not None for member in self.crew) and time.monotonic() < deadline:
            for member in self.crew:
                member.look_after(time.monotonic(), ending=True)
            self.janitor.look_after()
            time.sleep(0.05)

    def kill_all(self) -> None:
        """Whatever happened, nothing of ours goes on."""
        for member in self.crew:
            if member.is_alive:
                member.kill()
        if self.janitor._process is not None and self.janitor._process.poll() is None:
            self.janitor.kill()
            self.janitor._process.wait()

    def violations(self) -> list[dict[str, Any]]:
        """What the processes and we have seen; times are seconds from the start."""
        try:
            lines = (self.control / "violations").read_text().splitlines()
        except FileNotFoundError:
            lines = []
        seen = [*self.complaints, *map(json.loads, lines)]
        seen = [one for one in seen if not self._is_excused(one)]
        for one in seen:
            one["at"] = round(one["at"] - self.began, 3)
        return seen

    @property
    def damaged(self) -> set[str]:
        """Keys of entries that were damaged on purpose."""
        return {key for volume in self.volumes for key in volume.flips}

    def _is_excused(self, one: dict[str, Any]) -> bool:
        """An entry that was damaged on purpose may be met, and is set aside. One in memory goes with its
        producer, and what a producer had decided before it was stopped it does when it goes on."""
        if one["what"] not in (DELETED_UNDER_LEASE, MET_DAMAGE):
            return False
        if one["key"] in self.damaged:
            return True
        if one["what"] == MET_DAMAGE or self.files is not None:
            return False
        moments = [*self._disturbed, self._ended]
        return any(one["leased_at"] - 1.0 <= moment <= one["at"] for moment in moments)

    @property
    def totals(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for member in self.crew:
            total += member.totals
        for volume in self.volumes:
            total += volume.done
        return total
