"""RMSNorm (arXiv 1910.07467)."""

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Mean and scaling in float32 like transformers', but in place: four passes instead of six."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self._epsilon = float(norm.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]`."""
        exact = x.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(self._epsilon).rsqrt_()
        return exact.mul_(scale).to(x.dtype).mul_(self.weight)
