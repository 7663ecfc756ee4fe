"""What an arena knows of tensors."""

import torch
import xxhash

DTYPE_NAMES = ("F32", "BF16", "F16")
"""safetensors' names; a slot holds the index."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def digest(data: torch.Tensor) -> bytes:
    """The xxh3-128 checksum of a contiguous CPU tensor's bytes."""
    checksum: bytes = xxhash.xxh3_128_digest(data.reshape(-1).view(torch.uint8).numpy().data)
    return checksum
