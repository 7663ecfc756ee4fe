import pytest
import torch
from torch import nn

from epd_engine.layers.packed_linear import PackedLinear, pack_linears


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.down = nn.Sequential(nn.GELU(), nn.Linear(96, 48, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


@pytest.mark.parametrize("tokens", [1, 3, 16, 100])
def test_a_packed_module_computes_the_same_to_the_bit(tokens: int) -> None:
    block = Block().bfloat16()
    x = torch.randn(1, tokens, 48).bfloat16()
    with torch.inference_mode():
        expected = block(x)
        assert pack_linears(block) == 2
        assert isinstance(block.up, PackedLinear)
        assert torch.equal(block(x), expected)


def test_packing_keeps_the_count_of_parameters() -> None:
    block = Block().bfloat16()
    before = sum(p.numel() for p in block.parameters())
    pack_linears(block)
    assert sum(p.numel() for p in block.parameters()) == before


def test_other_dtypes_are_left_alone() -> None:
    assert pack_linears(Block()) == 0
