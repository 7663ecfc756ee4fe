"""Linear layers whose weights lie as the CPU's matrix kernels want them.

Without it oneDNN rearranges a bfloat16 weight at each call, which costs as much as the product itself where
few tokens are decoded: twice the speed for one token, a third more for sixteen, with AVX-512 BF16.
"""

from typing import Any

import torch
from torch import nn

_TYPICAL_TOKENS = 16  # the batch that the layout is chosen for; any other gives the same numbers


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it was made from did, to the bit."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_TOKENS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product


def pack_linears(module: nn.Module) -> int:
    """Replaces the bfloat16 linear layers of a module on the CPU, where this torch can; returns how many."""
    if not _is_supported():
        return 0
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear and _can_be_packed(child.weight):
            setattr(module, name, PackedLinear(child))
            count += 1
        else:
            count += pack_linears(child)
    return count


def _can_be_packed(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.bfloat16


def _is_supported() -> bool:
    # What torch's own compiler emits for CPUs; not a public name, so its absence costs speed only.
    operations: Any = torch.ops.mkldnn
    return bool(torch.backends.mkldnn.is_available()) and all(  # type: ignore[no-untyped-call]
        hasattr(operations, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
