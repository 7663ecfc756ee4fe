"""The ledger of what a connector holds outside of the encoder cache (vllm#44049's `ECConnectorCacheManager`).

An entry is

    allocated  --published-->  cached  --last reference given back-->  freeable  --room needed-->  freed
        |                        ^                                        |
        +--failed--> freed       +-----------------referenced again-------+

The scheduler side decides here, the worker side does: what is freed is told to it in the next step's metadata
(`take_freed`), and what it did comes back through `update_connector_output`. Readers in other processes hold
leases, which this ledger asks for when it needs room: a leased entry is not freed, whatever its references.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import Enum

from epd_engine.ec_store.ranges import RangeAllocator

Occurrence = tuple[str, int]
"""A request's id and the index of one of its items: a picture twice in one request is two references."""


class State(Enum):
    ALLOCATED = "allocated"  # has its room, is being written
    CACHED = "cached"  # readable, and somebody here refers to it
    FREEABLE = "freeable"  # readable until its room is needed


@dataclass
class Entry:
    """Sizes in embeddings and in bytes; `offset` is where its bytes lie."""

    num_embeds: int
    num_bytes: int
    offset: int
    state: State = State.ALLOCATED
    references: set[Occurrence] = field(default_factory=set)


class ECConnectorCacheManager:
    """Rooms of one producer's store, in bytes, and who still needs them."""

    def __init__(self, capacity: int, max_entries: int, leased: Callable[[], Container[str]]):
        """`capacity` in bytes; `leased` says which keys readers are about to load."""
        self._rooms = RangeAllocator(capacity)
        self._max_entries, self._leased = max_entries, leased
        self._entries: dict[str, Entry] = {}
        self._freeable: OrderedDict[str, None] = OrderedDict()
        self._freed: list[str] = []

    @property
    def capacity(self) -> int:
        return self._rooms.size

    @property
    def num_bytes(self) -> int:
        """Bytes taken, freeable ones included."""
        return self._rooms.used

    @property
    def num_embeds(self) -> int:
        return sum(entry.num_embeds for entry in self._entries.values())

    @property
    def end(self) -> int:
        """Where the last entry ends: memory beyond it is not needed."""
        return self._rooms.end

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def allocate(self, key: str, occurrence: Occurrence, num_embeds: int, num_bytes: int) -> Entry | None:
        """Room for an entry that is about to be written, with one reference; None: not now.

        A key that is being written already gains the reference; one that was published is written anew, since
        whoever asks has found it unusable.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.state is State.ALLOCATED:
            entry.references.add(occurrence)
            return entry
        references = {occurrence}
        if entry is not None:
            references |= entry.references
            self._free(key)
        offset = self._make_room(num_bytes)
        if offset is None:
            return None
        entry = self._entries[key] = Entry(num_embeds, num_bytes, offset, references=references)
        return entry

    def reference(self, key: str, occurrence: Occurrence) -> bool:
        """Takes a reference where the entry is there, so that it stays."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.references.add(occurrence)
        if entry.state is State.FREEABLE:
            entry.state = State.CACHED
            del self._freeable[key]
        return True

    def published(self, key: str) -> None:
        """The worker has written it."""
        entry = self._entries.get(key)
        if entry is not None and entry.state is State.ALLOCATED:
            entry.state = State.CACHED
            self._settle(key, entry)

    def failed(self, key: str) -> None:
        """The worker could not write it: nothing lies there."""
        if key in self._entries:
            self._free(key)

    def release(self, key: str, occurrence: Occurrence) -> None:
        """Gives one occurrence's reference back; harmless if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.references.discard(occurrence)
            self._settle(key, entry)

    def used(self, key: str) -> None:
        """A reader has taken it: it is the last to go."""
        if key in self._freeable:
            self._freeable.move_to_end(key)

    def resize(self, capacity: int) -> None:
        """Moves the limit. Entries beyond a lower one go as soon as nobody needs them."""
        if capacity != self._rooms.size:
            self._rooms.resize(capacity)
        if self._rooms.end > capacity:
            leased = self._leased()
            for key in list(self._freeable):
                entry = self._entries[key]
                if entry.offset + entry.num_bytes > capacity and key not in leased:
                    self._free(key)

    def take_freed(self) -> list[str]:
        """Keys freed since the last call, for the worker to take from the store before it writes."""
        freed, self._freed = self._freed, []
        return freed

    def _make_room(self, num_bytes: int) -> int | None:
        if len(self._entries) < self._max_entries:
            offset = self._rooms.allocate(num_bytes)
            if offset is not None:
                return offset
        leased = self._leased()
        unneeded = [key for key in self._freeable if key not in leased]
        free = self._rooms.size - self._rooms.used
        if free + sum(self._entries[key].num_bytes for key in unneeded) < num_bytes:
            return None  # all or nothing: what would not be enough stays
        for key in unneeded:
            self._free(key)
            offset = self._rooms.allocate(num_bytes)
            if offset is not None:
                return offset
        return None

    def _settle(self, key: str, entry: Entry) -> None:
        if entry.state is State.CACHED and not entry.references:
            entry.state = State.FREEABLE
            self._freeable[key] = None

    def _free(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._freeable.pop(key, None)
        self._rooms.free(entry.offset)
        self._freed.append(key)
