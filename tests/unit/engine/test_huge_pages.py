"""Weights on huge pages: what is moved, what is said to be, and what stands in the way."""

import ctypes
import errno
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from epd_engine.layers.huge_pages import HUGE_PAGE, collapse, merged, use_huge_pages, whole_pages
from epd_engine.layers.packed_linear import pack_linears

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture
def four_pages() -> Iterator[range]:
    """Memory that is in use and lies on small pages: where each of four huge ones would begin."""
    length = 5 * HUGE_PAGE
    begin = libc.mmap(
        None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    ctypes.memset(begin, 1, length)
    yield whole_pages(begin, begin + length)[:4]
    libc.munmap(begin, length)


@pytest.fixture
def weights() -> nn.Module:
    """Three of 8 MiB: wherever each begins, three huge pages lie in it."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3))).to(torch.bfloat16).eval()


def test_neighbours_in_memory_are_one_range() -> None:
    far = 100 << 20
    assert merged([(far, 10), (5000, 300), (200, 50)]) == [(200, 5300), (far, far + 10)]


def test_pages_that_are_not_wholly_in_a_range_stay_as_they_are() -> None:
    assert list(whole_pages(1, 3 * HUGE_PAGE + 1)) == [HUGE_PAGE, 2 * HUGE_PAGE]
    assert list(whole_pages(0, HUGE_PAGE)) == [0]
    assert not whole_pages(1, HUGE_PAGE)
    assert not whole_pages(HUGE_PAGE + 1, 2 * HUGE_PAGE - 1)


def test_a_hole_between_two_weights_keeps_neither_back(four_pages: range) -> None:
    if not collapse(list(four_pages[:1])):
        pytest.skip("this kernel moves no memory to huge pages when asked to (Linux 6.1 does)")
    libc.munmap(four_pages[2] + mmap.PAGESIZE, mmap.PAGESIZE)
    assert collapse(list(four_pages)) == 3


@torch.inference_mode()
def test_weights_on_huge_pages_are_the_same_weights(weights: nn.Module, four_pages: range) -> None:
    x = torch.randn(2, 2048).to(torch.bfloat16)
    pack_linears(weights)
    wanted = weights(x)
    does = collapse(list(four_pages)) == 4
    moved = use_huge_pages([weights])
    assert torch.equal(weights(x), wanted)
    assert moved >= 3 * 3 * HUGE_PAGE or not does


@pytest.mark.parametrize(("failures", "code", "moves"), [(3, errno.EAGAIN, True), (1, errno.ENOMEM, False)])
def test_pages_in_use_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, failures: int, code: int, moves: bool
) -> None:
    """What a kernel says for the moment, and what it says for good."""
    left = [code] * failures

    def madvise(begin: int, length: int, advice: int) -> int:
        if advice == mmap.MADV_HUGEPAGE or not left:
            return 0
        ctypes.set_errno(left.pop())
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    assert collapse([0]) == moves
