"""The range allocator against a set of bytes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from epd_engine.ec_store.ranges import ALIGNMENT, RangeAllocator, rounded

SIZE = 16 * ALIGNMENT

steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 6 * ALIGNMENT)),
        st.tuples(st.just("free"), st.integers(0, 20)),
        st.tuples(st.just("resize"), st.integers(1, 20)),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(steps)
def test_ranges_never_overlap_and_a_hole_that_fits_is_found(steps: list[tuple[str, int]]) -> None:
    allocator, taken, limit = RangeAllocator(SIZE), {}, SIZE
    for what, number in steps:
        used = {place for begin, end in taken.items() for place in range(begin, end, ALIGNMENT)}
        if what == "allocate":
            length = rounded(number)
            begin = allocator.allocate(number)
            fits = [
                start
                for start in range(0, limit - length + 1, ALIGNMENT)
                if not used & set(range(start, start + length, ALIGNMENT))
            ]
            assert begin == (fits[0] if fits else None), "the lowest place, if there is any"
            if begin is not None:
                taken[begin] = begin + length
        elif what == "free" and taken:
            begin = sorted(taken)[number % len(taken)]
            del taken[begin]
            allocator.free(begin)
        elif what == "resize":
            limit = number * ALIGNMENT
            allocator.resize(limit)
        assert allocator.used == sum(end - begin for begin, end in taken.items())
        assert allocator.end == max(taken.values(), default=0)
