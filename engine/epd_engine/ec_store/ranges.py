"""Which bytes of an arena are whose: first fit at the lowest place, neighbours joined when freed."""

from bisect import bisect_left, insort

ALIGNMENT = 256  # bytes; no two entries share a cache line, and rounding stays below 0.1 % of an entry


class RangeAllocator:
    """Ranges within `[0, size)`. Pure bookkeeping; the lowest hole is taken so that the end stays free."""

    def __init__(self, size: int):
        self._size = size
        self._holes: list[tuple[int, int]] = [(0, size)] if size else []  # (begin, end), ordered, apart
        self._taken: dict[int, int] = {}  # begin -> end

    @property
    def used(self) -> int:
        return sum(end - begin for begin, end in self._taken.items())

    @property
    def end(self) -> int:
        """Where the last range ends."""
        return max(self._taken.values(), default=0)

    @property
    def size(self) -> int:
        return self._size

    def allocate(self, length: int) -> int | None:
        """The first byte of `length` free ones, or None."""
        length = rounded(length)
        for index, (begin, end) in enumerate(self._holes):
            if end - begin >= length:
                if end - begin == length:
                    del self._holes[index]
                else:
                    self._holes[index] = (begin + length, end)
                self._taken[begin] = begin + length
                return begin
        return None

    def free(self, begin: int) -> None:
        """Gives back the range that begins at `begin`. Raises KeyError for one that was not given out."""
        end = self._taken.pop(begin)
        index = bisect_left(self._holes, (begin, end))
        if index < len(self._holes) and self._holes[index][0] == end:
            end = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == begin:
            begin = self._holes.pop(index - 1)[0]
        if begin < self._size:
            insort(self._holes, (begin, min(end, self._size)))

    def resize(self, size: int) -> None:
        """Moves the limit. Ranges beyond a lower one stay taken until they are freed."""
        self._size, self._holes = size, []
        begin = 0
        for taken, end in sorted(self._taken.items()):
            if begin < min(taken, size):
                self._holes.append((begin, min(taken, size)))
            begin = end
        if begin < size:
            self._holes.append((begin, size))


def rounded(length: int) -> int:
    """`length` as a range takes it."""
    return -(-length // ALIGNMENT) * ALIGNMENT
