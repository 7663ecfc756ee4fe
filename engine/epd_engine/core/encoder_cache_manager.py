"""The ledger of the encoder cache: which outputs are resident, and who still needs them.

The tensors live with the runner, by the same mm_hash; this side decides, and tells the runner through the
step's list of freed hashes. An entry nobody references stays until room is needed (lazy, least recently
released first), so that a repeated picture costs nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from epd_engine.core.request import MediaItem, Request


@dataclass
class _Entry:
    item: MediaItem
    # One reference per occurrence: a picture twice in one request is two.
    references: set[tuple[str, int]] = field(default_factory=set)


class EncoderCacheManager:
    """Capacity and sizes are in embeddings."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: dict[str, _Entry] = {}
        self._freeable: OrderedDict[str, None] = OrderedDict()
        self._used = 0
        self._freed: list[str] = []

    @property
    def num_used(self) -> int:
        """Embeddings resident, freeable ones included."""
        return self._used

    @property
    def num_referenced(self) -> int:
        return sum(e.item.num_embeds for e in self._entries.values() if e.references)

    def conflicts(self, item: MediaItem) -> bool:
        """Whether another size or placement is resident under this key: one of the two is a lie."""
        entry = self._entries.get(item.mm_hash)
        return entry is not None and not entry.item.is_same_media(item)

    def reference_if_cached(self, request: Request, index: int) -> bool:
        """Takes a reference for this occurrence where the item is resident."""
        entry = self._entries.get(request.media[index].mm_hash)
        if entry is None:
            return False
        self._freeable.pop(request.media[index].mm_hash, None)
        entry.references.add((request.request_id, index))
        return True

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
            key, _ = self._freeable.popitem(last=False)
            self._forget(key)
        self._entries[item.mm_hash] = _Entry(item, {(request.request_id, index)})
        self._used += item.num_embeds
        return True

    def release(self, request: Request, index: int) -> None:
        """Gives one occurrence's reference back; harmless if there is none."""
        key = request.media[index].mm_hash
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.references.discard((request.request_id, index))
        if not entry.references and key not in self._freeable:
            self._freeable[key] = None

    def release_all(self, request: Request) -> None:
        for index in range(len(request.media)):
            self.release(request, index)

    def drop(self, mm_hash: str) -> None:
        """Forgets an item whose tensor never came, references and all."""
        if mm_hash in self._entries:
            self._freeable.pop(mm_hash, None)
            self._forget(mm_hash)

    def problems(self) -> list[str]:
        """What does not add up at rest, when no request holds anything."""
        held = [key for key, entry in self._entries.items() if entry.references]
        found = [f"item {held[0]} is referenced by nobody that lives"] if held else []
        used = sum(entry.item.num_embeds for entry in self._entries.values())
        if used != self._used or len(self._freeable) + len(held) != len(self._entries):
            found.append(f"{self._used} embeddings on the books, {used} in the cache")
        return found

    def take_freed(self) -> list[str]:
        """Hashes evicted since the last call. The runner frees them before it loads or encodes, so an
        item that was evicted and has come back within one step is made anew (vllm#52482)."""
        freed, self._freed = self._freed, []
        return freed

    def _forget(self, key: str) -> None:
        self._used -= self._entries.pop(key).item.num_embeds
        self._freed.append(key)
