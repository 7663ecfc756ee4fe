"""Paged attention against attention over each sequence alone."""

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from epd_engine.attention import sdpa
from epd_engine.attention.base import Attention
from epd_engine.attention.flash import FlashAttention, PagedFlashAttention
from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.packed_batch import PackedBatch, Span, paged_attention
from epd_engine.attention.sdpa import SdpaAttention, groups_of_like_length
from tests.support.flash_kernel import cpu_kernel

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 6, 2, 8, 4, 64
LAYER: Any = SimpleNamespace(layer_idx=0)
KINDS = [SdpaAttention, FlashAttention, PagedFlashAttention]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Iterator[type[Attention]]:
    with cpu_kernel() as calls:
        yield request.param
    form = {SdpaAttention: "none", FlashAttention: "packed", PagedFlashAttention: "paged"}[request.param]
    assert {call.split()[0] for call in calls} == ({form} - {"none"})


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        num_layers=1,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )


class Sequence:
    """A sequence with all its queries, keys and values `[heads, length, dim]`, and blocks of its own."""

    def __init__(self, length: int, blocks: list[int], generator: torch.Generator):
        self.length, self.blocks, self.done = length, blocks, 0
        self.q = torch.randn(HEADS, length, DIM, generator=generator)
        self.k = torch.randn(KV_HEADS, length, DIM, generator=generator)
        self.v = torch.randn(KV_HEADS, length, DIM, generator=generator)
        self.expected = scaled_dot_product_attention(
            self.q[None], self.k[None], self.v[None], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)


def run(kv: KVCache, parts: list[tuple[Sequence, int]], kind: type[Attention]) -> None:
    """One step: for each sequence its next tokens; what comes out must be what attention alone gives."""
    spans, begin = [], 0
    for sequence, count in parts:
        spans.append(Span(begin, sequence.done, sequence.done + count, sequence.blocks))
        begin += count
    q, k, v = (
        torch.cat([getattr(s, name)[:, s.done : s.done + n] for s, n in parts], dim=1)[None] for name in "qkv"
    )
    out, _ = paged_attention(
        LAYER, q, k, v, None, scaling=DIM**-0.5, batch=PackedBatch(kv, spans, kind=kind), is_causal=True
    )
    assert out.shape == (1, begin, HEADS, DIM)
    for span, (sequence, count) in zip(spans, parts, strict=True):
        got = out[0, span.begin : span.begin + count]
        torch.testing.assert_close(got, sequence.expected[span.start : span.end], atol=1e-5, rtol=1e-4)
    for wanted in (spans, spans[::2], []):
        asked = [replace(span, is_wanted=span in wanted) for span in spans]
        ask_last(PackedBatch(kv, asked, kind=kind), parts, spans, wanted, (q, k, v))
    for sequence, count in parts:
        sequence.done += count


def ask_last(
    batch: PackedBatch,
    parts: list[tuple[Sequence, int]],
    spans: list[Span],
    wanted: list[Span],
    qkv: tuple[torch.Tensor, ...],
) -> None:
    """The same step in a last layer, where only `wanted` spans' last tokens attend."""
    if batch.wanted is None:  # of every span there is but one token
        return
    assert batch.wanted.tolist() == [span.last for span in wanted]
    q, k, v = qkv
    out, _ = paged_attention(LAYER, q[:, :, batch.wanted], k, v, None, scaling=DIM**-0.5, batch=batch)
    assert out.shape == (1, len(wanted), HEADS, DIM)
    expected = [s.expected[span.end - 1] for (s, _), span in zip(parts, spans, strict=True) if span in wanted]
    for got, alone in zip(out[0], expected, strict=True):
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_prefills_chunks_and_decodes_is_attention_of_each_alone(
    kind: type[Attention], seed: int
) -> None:
    mix(kind, seed)


@pytest.mark.parametrize("seed", range(12))
def test_where_products_are_slow_decodes_attend_otherwise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "has_products", lambda *_: False)
    mix(SdpaAttention, seed)


def mix(kind: type[Attention], seed: int) -> None:
    """Steps of random sequences, in random parts, until all are done."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kv = cache()
    free = list(range(BLOCKS))
    rng.shuffle(free)
    sequences = []
    for _ in range(rng.randint(1, 5)):
        length = rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, rng.randint(1, 40)])
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        sequences.append(Sequence(length, blocks, generator))
    while left := [s for s in sequences if s.done < s.length]:
        parts = []
        for sequence in rng.sample(left, rng.randint(1, len(left))):
            rest = sequence.length - sequence.done
            parts.append((sequence, rng.choice([1, min(rest, 7), rest])))
        run(kv, parts, kind)


def test_two_sequences_share_the_blocks_of_one_beginning(kind: type[Attention]) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = cache()
    one = Sequence(10, [5, 9, 2], generator)
    run(kv, [(one, 8)], kind)
    other = Sequence(10, [5, 9, 7], generator)
    other.k[:, :8], other.v[:, :8] = one.k[:, :8], one.v[:, :8]
    other.expected = scaled_dot_product_attention(
        other.q[None], other.k[None], other.v[None], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    other.done = 8
    run(kv, [(one, 1), (other, 1)], kind)
    run(kv, [(other, 1), (one, 1)], kind)


def test_what_a_former_owner_left_in_other_blocks_does_no_harm(kind: type[Attention]) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = cache()
    for keys, values in kv.layers:
        keys[20:].fill_(float("nan"))
        values[20:].fill_(float("nan"))
    short, long = Sequence(2, [0], generator), Sequence(3 * BLOCK, [1, 2, 3], generator)
    run(kv, [(short, 1), (long, 3 * BLOCK - 1)], kind)
    run(kv, [(short, 1), (long, 1)], kind)


def test_groups_hold_no_one_much_shorter_than_their_longest() -> None:
    lengths = [1, 30, 4, 29, 3, 23, 22]
    groups = groups_of_like_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert [[lengths[i] for i in group] for group in groups] == [[30, 29, 23], [22], [4, 3], [1]]
    assert groups_of_like_length([]) == []
