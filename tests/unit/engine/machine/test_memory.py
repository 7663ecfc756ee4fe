"""How memory is divided, and what is said when it does not suffice."""

import re

import pytest

from epd_engine.machine.device import DeviceError
from epd_engine.machine.memory import MemoryNeeds, kv_tokens

GIB = 1 << 30
NEEDS = MemoryNeeds(weights=8 * GIB, encoder_cache=GIB, kv_token=GIB // 1024)  # 1024 tokens a GiB
ENCODER = MemoryNeeds(weights=2 * GIB, encoder_cache=GIB, kv_token=0)


@pytest.mark.parametrize(
    ("free", "tokens"),
    [
        (100, 4096),  # some full contexts
        (15, 3072),  # half of what is left
        (11, 1024),  # one context, though it is all that is left beyond the half
        (10, 1024),
    ],
)
def test_nobody_says_how_much_kv(free: int, tokens: int) -> None:
    assert kv_tokens(NEEDS, free * GIB, context=1024, asked=None) == tokens


def test_what_is_asked_for_is_taken_as_long_as_there_is_any() -> None:
    assert kv_tokens(NEEDS, 15 * GIB, context=1024, asked=6000) == 6000


def test_no_kv_is_planned_for_an_encoder() -> None:
    assert kv_tokens(ENCODER, 3 * GIB, context=1024, asked=None) * ENCODER.kv_token == 0


@pytest.mark.parametrize(
    ("needs", "free", "asked", "message"),
    [
        (
            NEEDS,
            9.5,
            None,
            "at least 10.00 GiB (8.00 GiB for weights, 1.00 GiB for cached encoder outputs, 1.00 GiB for KV "
            "of 1024 tokens), and 9.50 GiB is free here: lower --max-model-len,",
        ),
        (NEEDS, 12, 8192, "at least 17.00 GiB .*8192 tokens.* lower --kv-cache-tokens,"),
        (NEEDS, 8, 8192, "17.00 GiB .* 8.00 GiB is free here: give it more memory, or a smaller model"),
        (
            ENCODER,
            1,
            None,
            "at least 3.00 GiB (2.00 GiB for weights, 1.00 GiB for cached encoder outputs), and",
        ),
    ],
)
def test_too_little_is_refused_with_the_sums(
    needs: MemoryNeeds, free: float, asked: int | None, message: str
) -> None:
    with pytest.raises(DeviceError) as refused:
        kv_tokens(needs, int(free * GIB), context=1024, asked=asked)
    pattern = re.escape(message).replace(r"\.\*", ".*")
    assert re.search(pattern, str(refused.value))
