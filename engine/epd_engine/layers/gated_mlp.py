"""The gated feed-forward layer (SwiGLU, arXiv 2002.05202)."""

from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from epd_engine.layers.packed_linear import PackedLinear, add_linear, can_be_packed


class GatedMLP(nn.Module):
    """SiLU is part of the gate's product where that is packed, and the two halves meet in place."""

    def __init__(self, mlp: Any):
        super().__init__()
        gate, activation = mlp.gate_proj, mlp.act_fn
        is_one = isinstance(activation, SiLUActivation) and can_be_packed(gate)
        self.gate = PackedLinear(gate, "swish") if is_one else nn.Sequential(gate, activation)
        self.up, self.down = mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Both `[..., width]`; `residual` is added to the outcome."""
        return add_linear(residual, self.down, self.gate(x).mul_(self.up(x)))
