"""The engine by FlashAttention kernels: the same tokens as plain transformers, in tower and language model.

torch has such kernels for GPUs alone; here one for CPUs stands in, by the same operator.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest

from epd_engine.attention import choice
from epd_engine.attention.base import Attention
from epd_engine.attention.flash import FlashAttention, PagedFlashAttention
from epd_engine.attention.segments import flash_segments
from epd_engine.layers import fuse
from tests.support.conversations import Conversations
from tests.support.digits import MODEL, Reference, assert_same_tokens
from tests.support.flash_kernel import cpu_kernel
from tests.support.in_process import InProcess

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 6


@pytest.fixture(params=[FlashAttention, PagedFlashAttention], ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Attention]]:
    monkeypatch.setattr(choice, "better_than_sdpa", lambda _: [request.param])
    monkeypatch.setattr(fuse, "choose_segments", lambda *_: flash_segments)
    with cpu_kernel() as calls:
        yield request.param
    form = "packed" if request.param is FlashAttention else "paged"
    assert set(calls) == {f"{form} causal", f"{form} full", "packed full"}


@pytest.mark.parametrize("chunk", [13, 2048])
def test_tokens_equal_transformers(kind: type[Attention], chunk: int) -> None:
    """Chunks, decodes beside them, pictures of many sizes at once, and beginnings that are known already."""
    reference, chats = Reference(MODEL), Conversations(seed=5).take(12)
    with closing(
        InProcess(MODEL, max_model_len=384, kv_cache_tokens=8192, max_num_batched_tokens=chunk)
    ) as engine:
        assert engine.engine.describe()["attention"] == kind.__name__
        for _ in range(2):
            answers = engine.ask(chats, max_tokens=TOKENS, ignore_eos=True)
            for messages, answer in zip(chats, answers, strict=True):
                assert_same_tokens(answer.ids, reference.follow(messages, answer.ids))
        assert engine.engine.stats.cached_prompt_tokens > 0
