"""Kernels are tried before they are used: one that is absent, refuses or is wrong leaves the next best."""

import logging
from typing import Any

import pytest
import torch

from epd_engine.attention import choice
from epd_engine.attention.choice import choose_attention, choose_segments, try_segments
from epd_engine.attention.flash import FlashAttention, PagedFlashAttention, activate_paged
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.sdpa import SdpaAttention
from epd_engine.attention.segments import flash_segments, sdpa_segments
from tests.support.flash_kernel import attention, cpu_kernel

HEADS, DIM = 4, 8


def cache(dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(
        num_layers=1, num_blocks=2, block_size=16, kv_heads=2, head_dim=DIM, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(PagedFlashAttention, lambda _: None), (FlashAttention, lambda _: None)]
    monkeypatch.setattr(choice, "better_than_sdpa", lambda _: both)


def causal_from_the_beginning(*arguments: Any, **options: Any) -> torch.Tensor:
    """The other meaning of causal: the first query sees the first key alone, whatever comes before."""
    query, key = arguments[0], arguments[1]
    if options.get("block_table") is None:
        return attention(*arguments, **options)
    one_page = options["block_table"][:, :1]
    lengths = torch.full_like(options["seqused_k"], min(key.shape[1], len(query)))
    return attention(*arguments, **options | {"block_table": one_page, "seqused_k": lengths})


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
        (no_pages, FlashAttention, ["PagedFlashAttention is not used: block_table is not supported"]),
        (
            causal_from_the_beginning,
            FlashAttention,
            ["PagedFlashAttention is not used: it differs from plain attention by"],
        ),
        (
            nothing_but_nan,
            SdpaAttention,
            ["PagedFlashAttention is not used: it differs", "FlashAttention is not used: it differs"],
        ),
    ],
)
def test_a_kernel_that_refuses_or_is_wrong_is_not(
    kernel: Any, used: type, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with cpu_kernel(kernel), caplog.at_level(logging.INFO, logger=choice.__name__):
        assert choose_attention(cache(), HEADS) is used
    for line, wanted in zip(caplog.messages, said, strict=True):
        assert line.startswith(wanted)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_any_kernel_there_is_sdpa() -> None:
    """torch has none for CPUs, as it has none for old GPUs: the operator refuses."""
    assert choose_attention(cache(), HEADS) is SdpaAttention


def test_pages_ask_for_a_package_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ValueError, match=r"no paged kernel for compute capability 8\.6"):
        activate_paged(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        activate_paged(torch.device("cuda"))


def test_a_tower_s_kernel_is_tried_with_pictures_of_two_sizes() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    with cpu_kernel() as calls:
        try_segments(flash_segments, like, HEADS, DIM)
    assert calls == ["packed full"]
    with cpu_kernel(nothing_but_nan), pytest.raises(ArithmeticError, match="differs from plain attention"):
        try_segments(flash_segments, like, HEADS, DIM)
