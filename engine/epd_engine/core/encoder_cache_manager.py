"""The ledger of the encoder cache: which outputs are resident, and who still needs them.

The tensors live with the runner, by the same mm_hash; this side decides, and tells the runner through the
step's moves. An entry nobody references stays until room is needed (lazy, least recently released first), so
that a repeated picture costs nothing.

A request that is preempted needs its media a second time. Where it came without pixels and the store may have
let go of them meanwhile, nothing could make them again: such an item is not freed when it is evicted but *set
aside* in host memory, until no living request has it. That is small beside the KV of the same requests: an
embedding is one row, where the KV of its token has two for each layer.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from epd_engine.core.request import MediaItem, Request


@dataclass
class _Entry:
    item: MediaItem
    # One reference per occurrence: a picture twice in one request is two.
    references: set[tuple[str, int]] = field(default_factory=set)


@dataclass
class EncoderCacheMoves:
    """What the runner does with its tensors before it loads or encodes, in this order, by mm_hash. So an item
    that was evicted and has come back within one step is made anew (vllm#52482)."""

    freed: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    brought_back: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.freed or self.set_aside or self.brought_back)


class EncoderCacheManager:
    """Capacity and sizes are in embeddings."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: dict[str, _Entry] = {}
        self._freeable: OrderedDict[str, None] = OrderedDict()
        self._used = 0
        self._moves = EncoderCacheMoves()
        # Their tensors come in the step that is being planned, so that it cannot evict them.
        self._planned: set[str] = set()
        # Ids of living requests that could not make the item again.
        self._wanted: dict[str, set[str]] = {}
        self._aside: dict[str, MediaItem] = {}

    @property
    def num_used(self) -> int:
        """Embeddings resident, freeable ones included."""
        return self._used

    @property
    def num_referenced(self) -> int:
        """May be asked for in any thread, as may `num_aside`."""
        # A copy is made in one go: the scheduler's thread does not get in between.
        return sum(e.item.num_embeds for e in tuple(self._entries.values()) if e.references)

    @property
    def num_aside(self) -> int:
        """Embeddings that wait in host memory for requests that may need them again."""
        return sum(item.num_embeds for item in tuple(self._aside.values()))

    def expect(self, request: Request) -> None:
        """`request` lives from now on: once its items without pixels are here, they are kept for it."""
        for item in request.media:
            if item.features is None:
                self._wanted.setdefault(item.mm_hash, set()).add(request.request_id)

    def forget(self, request: Request) -> None:
        """`request` has ended, and with it all that was kept for it alone."""
        self.release_all(request)
        for key in {item.mm_hash for item in request.media} & self._wanted.keys():
            self._wanted[key].discard(request.request_id)
            if not self._wanted[key]:
                del self._wanted[key]
                self._free_aside(key)

    def conflicts(self, item: MediaItem) -> bool:
        """Whether another size or placement is known under this key: one of the two is a lie."""
        entry = self._entries.get(item.mm_hash)
        known = self._aside.get(item.mm_hash) if entry is None else entry.item
        return known is not None and not known.is_same_media(item)

    def reference_if_cached(self, request: Request, index: int) -> bool:
        """Takes a reference for this occurrence where the item is resident."""
        entry = self._entries.get(request.media[index].mm_hash)
        if entry is None:
            return False
        self._freeable.pop(request.media[index].mm_hash, None)
        entry.references.add((request.request_id, index))
        return True

    def is_aside(self, item: MediaItem) -> bool:
        return item.mm_hash in self._aside

    def bring_back(self, request: Request, index: int) -> bool:
        """Makes an item that was set aside resident again, with one reference. False: no room yet."""
        if not self.allocate(request, index):
            return False
        key = request.media[index].mm_hash
        del self._aside[key]
        self._moves.brought_back.append(key)
        return True

    def can_repeat(self, request: Request) -> bool:
        """Whether `request` could be computed once more whatever becomes of the store. Not so where an item
        without pixels never came here, since its KV was another request's."""
        return all(
            item.features is not None or self.is_cached(item) or self.is_aside(item) for item in request.media
        )

    def is_cached(self, item: MediaItem) -> bool:
        return item.mm_hash in self._entries

    def can_allocate(self, item: MediaItem) -> bool:
        """Whether there is room, counting what nobody references."""
        freeable = sum(self._entries[key].item.num_embeds for key in self._freeable)
        return item.num_embeds <= self.capacity - self._used + freeable

    def allocate(self, request: Request, index: int) -> bool:
        """Makes the item resident with one reference, evicting what nobody references. All or nothing."""
        item = request.media[index]
        assert item.mm_hash not in self._entries, "resident items are referenced, not allocated"
        if not self.can_allocate(item):
            return False
        while item.num_embeds > self.capacity - self._used:
            self._evict(self._freeable.popitem(last=False)[0])
        self._entries[item.mm_hash] = _Entry(item, {(request.request_id, index)})
        self._planned.add(item.mm_hash)
        self._used += item.num_embeds
        return True

    def release(self, request: Request, index: int) -> None:
        """Gives one occurrence's reference back; harmless if there is none."""
        key = request.media[index].mm_hash
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.references.discard((request.request_id, index))
        if not entry.references and key not in self._freeable and key not in self._planned:
            self._freeable[key] = None

    def release_all(self, request: Request) -> None:
        for index in range(len(request.media)):
            self.release(request, index)

    def drop(self, mm_hash: str) -> None:
        """Forgets an item whose tensor never came, references and all."""
        if mm_hash in self._entries:
            self._freeable.pop(mm_hash, None)
            self._remove(mm_hash)
            self._moves.freed.append(mm_hash)

    def problems(self) -> list[str]:
        """What does not add up at rest, when no request holds anything."""
        held = [key for key, entry in self._entries.items() if entry.references]
        found = [f"item {held[0]} is referenced by nobody that lives"] if held else []
        used = sum(entry.item.num_embeds for entry in self._entries.values())
        if used != self._used or len(self._freeable) + len(held) != len(self._entries):
            found.append(f"{self._used} embeddings on the books, {used} in the cache")
        if self._wanted or self._aside:
            found.append(f"{len(self._wanted)} items are wanted and {len(self._aside)} set aside for nobody")
        return found

    def take_moves(self) -> EncoderCacheMoves:
        """The moves since the last call; ends the planning of a step."""
        moves, self._moves = self._moves, EncoderCacheMoves()
        for key in self._planned & self._entries.keys():
            if not self._entries[key].references:
                self._freeable[key] = None
        self._planned.clear()
        return moves

    def _evict(self, key: str) -> None:
        item = self._remove(key)
        if key in self._wanted:
            self._aside[key] = item
            self._moves.set_aside.append(key)
        else:
            self._moves.freed.append(key)

    def _free_aside(self, key: str) -> None:
        if self._aside.pop(key, None) is not None:
            if key in self._moves.set_aside:
                self._moves.set_aside.remove(key)
            self._moves.freed.append(key)

    def _remove(self, key: str) -> MediaItem:
        item = self._entries.pop(key).item
        self._used -= item.num_embeds
        return item
