import copy

import pytest
import torch
from torch import nn

from epd_engine.layers import packed_linear
from epd_engine.layers.packed_linear import PackedLinear, pack_linears

HALVES = [torch.bfloat16, torch.float16]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.down = nn.Sequential(nn.GELU(), nn.Linear(96, 48, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


@pytest.mark.parametrize("tokens", [1, 3, 16, 100])
def test_a_packed_module_computes_the_same(tokens: int) -> None:
    """To the bit where this CPU multiplies bfloat16; where it does not, as near to the truth."""
    block = Block().bfloat16()
    x = torch.randn(1, tokens, 48).bfloat16()
    with torch.inference_mode():
        exact = copy.deepcopy(block).float()(x.float())
        own = block(x)
        assert pack_linears(block) == 2
        assert isinstance(block.up, PackedLinear)
        found = block(x)
    if block.up.weight.dtype is torch.bfloat16:
        assert torch.equal(found, own)
    assert (found - exact).norm() <= 1.1 * (own - exact).norm()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_cpu_without_products_of_the_dtype_rounds_outcomes_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int
) -> None:
    monkeypatch.setattr(packed_linear, "has_products", lambda _, asked: asked is torch.float32)
    linear = nn.Linear(64, 96).to(dtype)
    x, residual = torch.randn(tokens, 64).to(dtype), torch.randn(tokens, 96).to(dtype)
    with torch.inference_mode():
        exact = copy.deepcopy(linear).float()(x.float())
        packed, gate = PackedLinear(linear), PackedLinear(linear, "swish")
        near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}  # half of it is what one rounding errs
        torch.testing.assert_close(packed(x), exact.to(dtype), **near)
        torch.testing.assert_close(gate(x), nn.functional.silu(exact).to(dtype), **near)
        torch.testing.assert_close(packed.added_to(x, residual), (exact + residual).to(dtype), **near)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_the_cpu_does_not_multiply_is_always_packed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(packed_linear, "has_products", lambda _, asked: asked is torch.float32)
    block = Block().to(dtype)
    assert pack_linears(block) == 2
    assert block.up.weight.dtype is torch.float32


def test_a_torch_that_cannot_pack_computes_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no kernel for this processor")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    packed_linear._is_possible.cache_clear()
    assert pack_linears(Block().bfloat16()) == 0
    assert "no kernel for this processor" in caplog.text
    packed_linear._is_possible.cache_clear()


def test_packing_keeps_the_count_of_parameters() -> None:
    block = Block().bfloat16()
    before = sum(p.numel() for p in block.parameters())
    pack_linears(block)
    assert sum(p.numel() for p in block.parameters()) == before


def test_other_dtypes_are_left_alone() -> None:
    assert pack_linears(Block()) == 0
