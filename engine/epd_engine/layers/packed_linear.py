"""Linear layers whose weights lie as the CPU's matrix kernels want them.

Without it oneDNN rearranges a bfloat16 weight at each call, which costs as much as the product itself where
few tokens are decoded: twice the speed for one token, a third more for sixteen, with AVX-512 BF16.
"""

import logging
from functools import cache

import torch
from torch import nn

from epd_engine.layers.linear import linear_of
from epd_engine.machine.device import has_products

log = logging.getLogger(__name__)

_HALVES = (torch.bfloat16, torch.float16)
_TYPICAL_TOKENS = 16  # the batch that the layout is chosen for; any other gives the same numbers


class PackedLinear(nn.Module):
    """Computes what the `nn.Linear` it was made from did; then, where asked to, SiLU ("swish"), before the
    sum is rounded.

    To the bit, where the CPU multiplies matrices of the weight's dtype. Where it does not (bfloat16 with AVX2
    alone, float16 on most), weights are held in float32, and only outcomes are rounded: seven times as fast
    as torch's own loop, for twice the memory.
    """

    def __init__(self, linear: nn.Linear, activation: str = "none"):
        super().__init__()
        weight = linear.weight.detach()
        dtype = weight.dtype if has_products(weight.device, weight.dtype) else torch.float32
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _TYPICAL_TOKENS)
        self.weight = nn.Parameter(packed, requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self.weight.dtype), self.weight, self.bias, self._activation, [], ""
        )
        return product.to(x.dtype)

    def added_to(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`, rounded once."""
        dtype = self.weight.dtype
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x.to(dtype), residual.to(dtype), self.weight, self.bias, "add"
        )
        return total.to(x.dtype)

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
    """Whether it is on the CPU, there is something to gain, and this torch can."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype not in _HALVES or not _is_possible(weight.dtype):
        return False
    return weight.dtype is torch.bfloat16 or not has_products(weight.device, weight.dtype)


@cache
def _is_possible(dtype: torch.dtype) -> bool:
    """Tries it: what torch's own compiler emits for CPUs has no public names, and not every build and
    processor has all of it. Its absence costs speed alone."""
    try:
        linear = PackedLinear(linear_of(torch.zeros(16, 16, dtype=dtype)), "swish")
        linear.added_to(linear(torch.zeros(2, 16, dtype=dtype)), torch.zeros(2, 16, dtype=dtype))
    except (RuntimeError, AttributeError) as error:
        log.warning("linear layers are slower here than they could be, since none can be packed: %s", error)
        return False
    return all(linear.memory)
