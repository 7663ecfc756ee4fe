"""Pods of a chaos test: each a process of its own user that writes or reads through a connector until it is
told to end. What it does at the moment, and has done, lies in a file that survives its death."""

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epd_engine.core.request import MediaItem
from epd_engine.ec_store.errors import StoreError
from epd_engine.ec_store.layout import ENTRY_NAME
from epd_engine.ec_transfer import shared_memory_connector, shared_storage_connector, tiered_connector
from epd_engine.ec_transfer.base import ECConnectorOutput
from epd_engine.ec_transfer.config import ECConfigError
from tests.support.connector_pairs import Instance
from tests.support.engine_objects import request
from tests.support.store_crashes import Crashes
from tests.support.store_items import IDENTITY, NAMESPACE, Items, difference, tensor_of

BUILT_IN = (shared_memory_connector, shared_storage_connector, tiered_connector)  # imported while one is root
EXIT_REFUSED = 3  # the connector did not start: the volume was not there for us
BEAT_BYTES = 4096
DAMAGED = ("checksum", "header", "disagree", "payload ends", "shorter")  # as reasons of a failed load
DELETED_UNDER_LEASE = "an entry was deleted under a live lease"
MET_DAMAGE = "a damaged entry was in its place"
SEEN_SECONDS = 2.0  # after so long a lease is known to everybody, a process that had to wait for a core too


@dataclass(frozen=True)
class Post:
    """What one process is to do. `control` is a directory outside of every store."""

    name: str
    role: str  # "ec_producer" or "ec_consumer"
    connector: str
    extra: Mapping[str, Any]
    items: Items
    seed: str
    uid: int
    gid: int
    control: Path
    holds: bool = False  # a reader that sometimes sits on its lease

    @property
    def beat(self) -> Path:
        return self.control / f"{self.name}.beat"

    @property
    def log(self) -> Path:
        return self.control / f"{self.name}.log"

    @property
    def stack(self) -> Path:
        return self.control / f"{self.name}.stack"


@dataclass
class Beat:
    """What a process says of itself; `at` by the monotonic clock, which all processes share."""

    at: float = 0.0
    doing: str = ""
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> "Beat":
        try:
            said = json.loads(path.read_bytes())
            return cls(said["at"], said["doing"], Counter(said["counts"]))
        except (OSError, ValueError, KeyError):
            return cls()


class Pod(Instance):
    """An instance whose encoder is `tensor_of`."""

    def encode(self, items: Sequence[MediaItem]) -> tuple[list[str], ECConnectorOutput]:
        """The keys whose room was there, and what became of them."""
        self._requests += 1
        asked = request(f"r{self._requests}", 0, list(items))
        saved = []
        for index, item in enumerate(items):
            if self.scheduler.ensure_cache_available(asked, index):
                self.scheduler.update_state_after_alloc(asked, index, load=False)
                saved.append(item.mm_hash)
                self.cache[item.mm_hash] = tensor_of(item.mm_hash)
        output = self.step(saved)
        self.scheduler.request_finished(asked)
        return saved, output

    def fetch(self, items: Sequence[MediaItem]) -> ECConnectorOutput:
        self._requests += 1
        asked = request(f"r{self._requests}", 64, list(items))
        for index in range(len(items)):
            self.scheduler.update_state_after_alloc(asked, index, load=True)
        output = self.step()
        self.scheduler.request_finished(asked)
        return output


class Worker:
    def __init__(self, post: Post, beat: int, violations: int):
        self.post, self._beat, self._violations = post, beat, violations
        self.rng = random.Random(post.seed)
        self.counts: Counter[str] = Counter()
        self._by_key = post.items.by_key() if post.holds else {}
        self.beat("starts")
        Crashes(random.Random(f"{post.seed}/crashes"), self.beat).install()
        self.pod = Pod(post.connector, post.role, post.extra, IDENTITY)
        self.scheduler: Any = self.pod.scheduler
        self.worker: Any = self.pod.worker

    def run(self) -> None:
        turn = self.write if self.post.role == "ec_producer" else self.read
        end = self.post.control / "end"
        while not end.exists():
            self.beat("turns")
            turn()
            self.pod.forget()
            self.counts["turns"] += 1
            self.beat("rests")
            time.sleep(self.rng.uniform(0.01, 0.12))
        self.beat("ends")
        self.finish()
        self.beat("ended")

    def write(self) -> None:
        items = self.post.items.some(self.rng, 3)
        self.beat("looks up")
        missing = [item for item in items if not self.pod.has(item)]
        self.counts["found"] += len(items) - len(missing)
        if not missing:
            self.pod.step()
            return
        self.beat("saves")
        saved, output = self.pod.encode(missing)
        self.counts["waited for room"] += len(missing) - len(saved)
        self.counts["saved"] += len(output.finished_sending)
        for reason in output.failed_sending.values():
            self.counts[f"not saved: {_kind(reason)}"] += 1
        unanswered = set(saved) - output.finished_sending - set(output.failed_sending)
        if unanswered and self.post.extra.get("write") != "back":
            self.violation("a save has no answer", sorted(unanswered)[0])

    def read(self) -> None:
        if self.post.holds and self.rng.random() < 0.2:
            self.hold(self._least_used() or self.post.items.one(self.rng))
            return
        items = self.post.items.some(self.rng, 2)
        self.beat("looks up")
        there = [item for item in items if self.pod.has(item)]
        self.counts["missed"] += len(items) - len(there)
        if not there:
            self.pod.step()
            return
        self.beat("loads")
        output = self.pod.fetch(there)
        for item in there:
            self.check(item.mm_hash, output)

    def check(self, key: str, output: ECConnectorOutput) -> None:
        """Exact, or a clean miss."""
        found, reason = self.pod.cache.get(key), output.failed_recving.get(key)
        if (found is None) != (reason is not None) or (found is not None) != (key in output.finished_recving):
            self.violation("a load has no answer, or two", key, reason=str(reason))
        elif found is None:
            kind = _kind(str(reason))
            self.counts[f"not loaded: {kind}"] += 1
            if kind in DAMAGED:
                self.violation(MET_DAMAGE, key, reason=str(reason))
        elif torch.equal(found, tensor_of(key)):
            self.counts["loaded"] += 1
        else:
            self.violation("a wrong tensor was loaded", key, difference=difference(key, found))

    def hold(self, item: MediaItem) -> None:
        """Sits on the lease of an entry: once everybody can know of it, the entry may not be deleted."""
        began, key, leases = time.monotonic(), item.mm_hash, self.scheduler.leases
        if not self.pod.has(item):
            return
        until = time.time() + leases.seconds - 0.5
        self.beat("sits on a lease")
        time.sleep(SEEN_SECONDS)
        if leases.holds(key) and self._is_there(item):
            self.counts["leases held"] += 1
            time.sleep(self.rng.uniform(0.2, 1.2))
            gone = not self._is_there(item)
            if gone and time.time() < until and leases.holds(key):
                self.violation(DELETED_UNDER_LEASE, key, leased_at=began)
        self.check(key, self.pod.fetch([item]))

    def _least_used(self) -> MediaItem | None:
        """One of the files that a janitor would delete first."""
        base, found = Path(self.post.extra.get("shared_storage_path", "")) / NAMESPACE, []
        for key, item in self._by_key.items():
            try:
                found.append(((base / key / ENTRY_NAME).stat().st_mtime, key, item))
            except OSError:
                continue
        return self.rng.choice(sorted(found)[:8])[2] if found else None

    def _is_there(self, item: MediaItem) -> bool:
        try:
            self.scheduler.store.probe(item.mm_hash, IDENTITY.expectation(item))
        except StoreError as error:
            return not str(error).startswith("no entry")
        return True

    def finish(self) -> None:
        """The last saves come home; then the ledger and the arena must say the same."""
        storage = getattr(self.worker, "storage", None)
        if storage is not None:
            storage.wait_for_save()
        self.pod.step()
        scheduler, worker = (getattr(side, "memory", side) for side in (self.scheduler, self.worker))
        manager, writer = getattr(scheduler, "manager", None), getattr(worker, "_writer", None)
        if manager is not None:
            self.pod.step()
            keys = set(manager._entries)
            states = Counter(entry.state.value for entry in manager._entries.values())
            if keys != set(writer._slots if writer else ()) or set(states) - {"freeable"}:
                slots = len(writer) if writer else 0
                self.violation("ledger and arena disagree at rest", "", ledger=dict(states), arena=slots)
        self.pod.close()

    def beat(self, doing: str) -> None:
        said = {"at": time.monotonic(), "doing": doing, "counts": self.counts}
        os.pwrite(self._beat, json.dumps(said).ljust(BEAT_BYTES).encode(), 0)

    def violation(self, what: str, key: str, **more: Any) -> None:
        account = {"what": what, "who": self.post.name, "pid": os.getpid(), "key": key}
        account |= {"at": time.monotonic(), **more}
        os.write(self._violations, json.dumps(account).encode() + b"\n")


def main(post: Post) -> None:
    """The process. Everything that needs root is opened first."""
    flags = os.O_WRONLY | os.O_CREAT
    beat = os.open(post.beat, flags | os.O_TRUNC)
    violations = os.open(post.control / "violations", flags | os.O_APPEND)
    log = os.open(post.log, flags | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(post.stack, "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    torch.set_num_threads(1)
    os.umask(0o022)
    os.setgroups([post.gid])  # as a volume's fsGroup: no pod's own group
    os.setgid(post.uid)
    os.setuid(post.uid)
    status = 0
    try:
        Worker(post, beat, violations).run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this process with an account
        traceback.print_exc()
        refused = isinstance(error, ECConfigError | OSError) and Beat.read(post.beat).doing == "starts"
        status = EXIT_REFUSED if refused else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _kind(reason: str) -> str:
    """A reason without what is particular to one entry."""
    known = (*DAMAGED, "No space left", "no room", "Permission denied", "is full", "no entry")
    known += ("was replaced", "share", "not encoded", "No such file", "slots")
    return next((words for words in known if words in reason), reason[:80])
