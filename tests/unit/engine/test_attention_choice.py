"""Kernels are tried before they are used: one that is absent, refuses or is wrong leaves the next best."""

import logging
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from epd_engine.attention import choice, flash
from epd_engine.attention.choice import (
    activate_kernels,
    choose_attention,
    choose_segments,
    try_attention,
    try_segments,
)
from epd_engine.attention.flash import FlashAttention, PagedFlashAttention
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.attention.segments import efficient_segments, flash_segments, sdpa_segments
from tests.support.flash_kernel import attention, cpu_kernel

HEADS, DIM = 4, 8


def cache(dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(
        num_layers=1, num_blocks=2, block_size=16, kv_heads=2, head_dim=DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both = choice.better_than_sdpa(torch.device("cuda"))
    monkeypatch.setattr(choice, "better_than_sdpa", lambda _: both)


def causal_from_the_beginning(*arguments: Any, **options: Any) -> torch.Tensor:
    """The other meaning of causal: the first query sees the first key alone, whatever comes before."""
    return attention(*arguments, **options, sees=lambda length, longest: torch.ones(length, longest).tril())


def nothing_but_nan(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.full_like(query, float("nan"))


def no_pages(*arguments: Any, **options: Any) -> torch.Tensor:
    if options.get("block_table") is not None:
        raise RuntimeError("block_table is not supported")
    return attention(*arguments, **options)


def test_a_cpu_has_nothing_better_than_sdpa() -> None:
    assert choose_attention(cache(), HEADS) is SdpaAttention
    assert choose_segments(torch.empty(0, dtype=torch.bfloat16), HEADS, DIM) is sdpa_segments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_best_kernel_that_is_right_is_used(dtype: torch.dtype) -> None:
    with cpu_kernel():
        assert choose_attention(cache(dtype), HEADS) is PagedFlashAttention


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("kernel", "used", "said"),
    [
        (no_pages, FlashAttention, [r"PagedFlashAttention: not used: block_table is not supported", "used"]),
        (causal_from_the_beginning, SdpaAttention, [r"not used: what it gives is off by \d"] * 2),
        (nothing_but_nan, SdpaAttention, ["not used: what it gives is off by nan"] * 2),
        # As torch itself has none for CPUs.
        (None, SdpaAttention, ["not used: Could not run 'aten::_flash_attention_forward'"] * 2),
    ],
)
def test_a_kernel_that_refuses_or_is_wrong_is_not(
    kernel: Any, used: type, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with nullcontext() if kernel is None else cpu_kernel(kernel), caplog.at_level(logging.INFO):
        assert choose_attention(cache(), HEADS) is used
    for line, wanted in zip(caplog.messages, said, strict=True):
        assert re.search(wanted, line)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_a_package_has_replaced_is_put_back_where_its_pages_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active = ["FA3"]
    monkeypatch.setattr(flash, "current_flash_attention_impl", lambda: active[-1] if active else None)
    monkeypatch.setattr(flash, "restore_flash_attention_impl", active.clear)
    with cpu_kernel(no_pages):
        assert choose_attention(cache(), HEADS) is FlashAttention
    assert active == []


@pytest.mark.parametrize(("major", "package"), [(9, "FA3"), (10, "FA4")])
def test_the_package_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch, major: int, package: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(flash, "activate_flash_attention_impl", asked.append)
    activate_kernels(torch.device("cuda"))
    assert asked == [package]


def test_without_a_package_torch_s_own_kernels_are_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "check_alive", lambda _: None)
    for capability in ((8, 6), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, said=capability: said)
        with caplog.at_level(logging.INFO):
            activate_kernels(torch.device("cuda"))
    none, absent = caplog.messages
    assert none == "a package of kernels: not used: there is none for compute capability 8.6"
    assert absent == "a package of kernels: not used: No module named 'flash_attn_interface'"


def test_a_gpu_that_a_kernel_has_broken_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(choice, "better_than_sdpa", lambda _: [FlashAttention])
    monkeypatch.setattr(choice, "check_alive", broken)
    with cpu_kernel(nothing_but_nan), pytest.raises(RuntimeError, match="illegal memory access"):
        choose_attention(cache(), HEADS)


def test_one_query_a_sequence_is_asked_for_without_a_window() -> None:
    """torch's own kernel is several times faster then, for heads that share keys."""
    with cpu_kernel() as calls:
        try_attention(FlashAttention, cache(), HEADS)
    assert set(calls) == {"packed causal", "packed full"}


def test_what_stands_in_for_a_tower_s_kernel_is_right() -> None:
    try_segments(efficient_segments, torch.empty(0, dtype=torch.bfloat16), HEADS, DIM)


def test_a_tower_s_kernel_is_tried_with_pictures_of_two_sizes() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    with cpu_kernel() as calls:
        try_segments(flash_segments, like, HEADS, DIM)
    assert calls == ["packed full"]
    with cpu_kernel(nothing_but_nan), pytest.raises(ArithmeticError, match="what it gives is off by nan"):
        try_segments(flash_segments, like, HEADS, DIM)
