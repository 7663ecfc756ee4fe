"""The connector's ledger against a simple model of it."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_engine.ec_store.ranges import ALIGNMENT
from epd_engine.ec_transfer.cache_manager import ECConnectorCacheManager, State

CAPACITY = 8 * ALIGNMENT
MAX_ENTRIES = 5
KEYS = [f"{n:064x}" for n in range(8)]
keys = st.sampled_from(KEYS)
occurrences = st.tuples(st.sampled_from(["r", "s"]), st.integers(0, 2))


class Ledger(RuleBasedStateMachine):
    """Sizes are in units of the alignment. `order` is what could be freed, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.leased: set[str] = set()
        self.manager = ECConnectorCacheManager(CAPACITY, MAX_ENTRIES, lambda: self.leased)
        self.references: dict[str, set[tuple[str, int]]] = {}
        self.sizes: dict[str, int] = {}
        self.written: set[str] = set()
        self.order: list[str] = []
        self.freed: list[str] = []

    @rule(key=keys, occurrence=occurrences, size=st.integers(1, 9))
    def allocate(self, key: str, occurrence: tuple[str, int], size: int) -> None:
        being_written = key in self.sizes and key not in self.written
        references = self.references.get(key, set()) | {occurrence}
        was = dict(self.sizes)
        entry = self.manager.allocate(key, occurrence, size, size * ALIGNMENT)
        freed = self.manager.take_freed()
        if being_written:
            assert entry is not None
            assert freed == []
            self.references[key].add(occurrence)
            return
        if key in was:
            assert freed.pop(0) == key, "what was found unusable goes before it is written anew"
            self.forget(key)
        assert freed == [k for k in self.order if k in freed], "least recently used first"
        assert not set(freed) & self.leased
        for victim in freed:
            self.forget(victim)
        if entry is None:
            unleased = [k for k in self.order if k not in self.leased]
            possible = CAPACITY // ALIGNMENT - sum(self.sizes.values())
            possible += sum(self.sizes[k] for k in unleased)
            full = len(self.sizes) >= MAX_ENTRIES and not unleased
            fragmented = bool(freed) or len(self.sizes) > len(unleased)
            assert possible < size or full or fragmented
            return
        self.references[key], self.sizes[key] = references, size

    @rule(key=keys)
    def published(self, key: str) -> None:
        self.manager.published(key)
        if key in self.sizes and key not in self.written:
            self.written.add(key)
            self.settle(key)

    @rule(key=keys)
    def failed(self, key: str) -> None:
        self.manager.failed(key)
        assert self.manager.take_freed() == ([key] if key in self.sizes else [])
        if key in self.sizes:
            self.forget(key)

    @rule(key=keys, occurrence=occurrences)
    def reference(self, key: str, occurrence: tuple[str, int]) -> None:
        assert self.manager.reference(key, occurrence) == (key in self.sizes)
        if key in self.sizes:
            self.references[key].add(occurrence)
            if key in self.order:
                self.order.remove(key)

    @rule(key=keys, occurrence=occurrences)
    def release(self, key: str, occurrence: tuple[str, int]) -> None:
        self.manager.release(key, occurrence)
        if key in self.sizes:
            self.references[key].discard(occurrence)
            self.settle(key)

    @rule(key=keys)
    def used(self, key: str) -> None:
        self.manager.used(key)
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)

    @rule(key=keys)
    def lease(self, key: str) -> None:
        self.leased ^= {key}

    @invariant()
    def the_ledger_is_what_it_should_be(self) -> None:
        assert self.manager.num_bytes == sum(self.sizes.values()) * ALIGNMENT <= CAPACITY
        assert len(self.manager) == len(self.sizes) <= MAX_ENTRIES
        assert self.manager.num_embeds == sum(self.sizes.values())
        places: list[tuple[int, int]] = []
        for key, size in self.sizes.items():
            entry = self.manager.get(key)
            assert entry is not None, "no entry is lost"
            assert entry.references == self.references[key], "no reference is lost"
            assert entry.state is self.state(key)
            places.append((entry.offset, entry.offset + size * ALIGNMENT))
        places.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places)), "no two share a byte"

    def state(self, key: str) -> State:
        if key not in self.written:
            return State.ALLOCATED
        return State.CACHED if self.references[key] else State.FREEABLE

    def settle(self, key: str) -> None:
        if key in self.written and not self.references[key] and key not in self.order:
            self.order.append(key)

    def forget(self, key: str) -> None:
        del self.sizes[key], self.references[key]
        self.written.discard(key)
        if key in self.order:
            self.order.remove(key)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def published(manager: ECConnectorCacheManager, key: str, size: int) -> None:
    assert manager.allocate(key, ("r", 0), size, size * ALIGNMENT)
    manager.published(key)
    manager.release(key, ("r", 0))


def test_a_lower_limit_frees_what_lies_beyond_it_and_nothing_that_is_leased() -> None:
    leased = {KEYS[3]}
    manager = ECConnectorCacheManager(CAPACITY, MAX_ENTRIES, lambda: leased)
    for key in KEYS[:4]:
        published(manager, key, 2)
    manager.resize(CAPACITY // 2)
    assert manager.take_freed() == [KEYS[2]]
    assert manager.end > manager.capacity, "memory beyond the limit is held for a reader"
    leased.clear()
    manager.resize(CAPACITY // 2)
    assert manager.take_freed() == [KEYS[3]]
    assert manager.end == manager.capacity
    assert manager.allocate(KEYS[4], ("r", 0), 1, ALIGNMENT)
    assert manager.take_freed() == [KEYS[0]]


def test_what_would_not_be_enough_is_not_freed() -> None:
    manager = ECConnectorCacheManager(CAPACITY, MAX_ENTRIES, set)
    published(manager, KEYS[0], 3)
    assert manager.allocate(KEYS[1], ("r", 0), 3, 3 * ALIGNMENT)  # being written
    assert manager.allocate(KEYS[2], ("r", 1), 6, 6 * ALIGNMENT) is None
    assert manager.take_freed() == []
    assert manager.get(KEYS[0]) is not None
