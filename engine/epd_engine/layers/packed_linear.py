"""Linear layers whose weights lie as the CPU's matrix kernels want them.

Without it oneDNN rearranges a bfloat16 weight at each call, which costs as much as the product itself where
few tokens are decoded: twice the speed for one token, a third more for sixteen, with AVX-512 BF16.
"""

from typing import Any

import torch
from torch import nn

_TYPICAL_TOKENS = 16  # the batch that the layout is chosen for; any other gives the same numbers


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it was made from did, to the bit; then, where asked to, SiLU ("swish"),
    before the sum is rounded."""

    def __init__(self, linear: nn.Linear, activation: str = "none"):
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_TOKENS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias, self._activation = linear.bias, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self._activation, [], ""
        )
        return product

    def added_to(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`, rounded once."""
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self.weight, self.bias, "add"
        )
        return total

    @property
    def memory(self) -> tuple[int, int]:
        """Where the weight lies: its address and its length in bytes."""
        return int(torch.ops.mkldnn.data_ptr(self.weight)), int(torch.ops.mkldnn._nbytes(self.weight))


def add_linear(residual: torch.Tensor, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`residual + linear(x)`."""
    return linear.added_to(x, residual) if isinstance(linear, PackedLinear) else residual + linear(x)


def pack_linears(module: nn.Module) -> int:
    """Replaces the linear layers of a module that can be packed; returns how many."""
    count = 0
    for name, child in module.named_children():
        if type(child) is nn.Linear and can_be_packed(child):
            setattr(module, name, PackedLinear(child))
            count += 1
        else:
            count += pack_linears(child)
    return count


def can_be_packed(linear: nn.Linear) -> bool:
    """Whether it is in bfloat16, on the CPU, and this torch can."""
    return linear.weight.device.type == "cpu" and linear.weight.dtype is torch.bfloat16 and _is_supported()


def _is_supported() -> bool:
    # What torch's own compiler emits for CPUs; not public names, so their absence costs speed only.
    operations: Any = torch.ops.mkldnn
    return bool(torch.backends.mkldnn.is_available()) and all(  # type: ignore[no-untyped-call]
        hasattr(operations, name)
        for name in ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")
    )
