"""KV memory as a pool of equal blocks."""


class BlockPool:
    """Block ids, free or held by a request. Holds no tensors."""

    def __init__(self, num_blocks: int, block_size: int):
        """`block_size` is in tokens."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))

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
            held.append(self._free.pop())
        return True

    def release(self, held: list[int]) -> None:
        """Takes every block of `held` back and empties it."""
        self._free.extend(reversed(held))
        held.clear()
