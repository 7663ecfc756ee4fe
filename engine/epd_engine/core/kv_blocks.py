"""KV memory as a pool of equal blocks, and the blocks whose content is known.

A full block is known by a hash over its tokens, the media in it and all that comes before, so that a request
whose prompt begins alike takes it over instead of computing it (prefix caching, as in vLLM). A block that
nobody holds keeps its content until it is needed for another: free blocks are used in the order in which they
were given back.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence, Set

from epd_engine.core.request import Request


class BlockPool:
    """Block ids, free or held by requests. Holds no tensors."""

    def __init__(self, num_blocks: int, block_size: int):
        """`block_size` is in tokens."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks if self.num_blocks else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, held: list[int], num_tokens: int) -> bool:
        """Extends `held` in place to room for `num_tokens`; all or nothing."""
        missing = self.blocks_for(num_tokens) - len(held)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._holders[block] = 1
            held.append(block)
        return True

    def release(self, held: list[int]) -> None:
        """Gives every block of `held` back and empties it. The end of a sequence goes first when room is
        needed: its beginning is what others are likely to share."""
        for block in reversed(held):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
        held.clear()

    def take_known(self, hashes: Sequence[bytes]) -> list[int]:
        """Holds the blocks of the longest known beginning of `hashes`."""
        held = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._free.pop(block, None)
            self._holders[block] += 1
            held.append(block)
        return held

    def learn(self, block: int, digest: bytes) -> None:
        """A held block's content is complete. A second block of the same content stays unknown."""
        if digest not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def problems(self, kept: Set[int] = frozenset()) -> list[str]:
        """What does not add up at rest, when no request holds anything but `kept`, which are for others."""
        held = [block for block, holders in enumerate(self._holders) if holders and block not in kept]
        found = [f"blocks {held[:8]} are held by nobody"] if held else []
        if len(self._free) + len(kept) != self.num_blocks:
            lost = self.num_blocks - len(self._free) - len(kept)
            found.append(f"{lost} of {self.num_blocks} blocks are lost")
        return found

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]


def block_hashes(request: Request, block_size: int, num_blocks: int) -> list[bytes]:
    """Hashes of the first `num_blocks` full blocks of `request`; what is known already is not made again.

    Each covers the block's tokens, the keys and places of media in it, the block before, and the tenant's
    salt.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), num_blocks):
        start, end = index * block_size, (index + 1) * block_size
        parent = hashes[-1] if hashes else hashlib.sha256(request.cache_salt.encode()).digest()
        digest = hashlib.sha256(parent)
        digest.update(array("q", request.tokens(start, end)).tobytes())
        for item in request.media_in(start, end):
            media = request.media[item]
            # Metadata too: another grid under one key is a false claim, and has other rotary positions.
            said = json.dumps(media.metadata, sort_keys=True)
            digest.update(f"{media.mm_hash} {media.offset - start} {media.num_embeds} {said}\n".encode())
        hashes.append(digest.digest())
    return hashes[:num_blocks]
