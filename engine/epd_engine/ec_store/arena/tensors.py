"""What an arena knows of tensors."""

import torch
import xxhash

DTYPE_NAMES = ("F32", "BF16", "F16")
"""safetensors' names; a slot holds the index."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK = 512 << 10  # bytes that are copied and then summed while the processor still has them


def digest(data: torch.Tensor) -> bytes:
    """The xxh3-128 checksum of a contiguous CPU tensor's bytes."""
    checksum: bytes = xxhash.xxh3_128_digest(data.reshape(-1).view(torch.uint8).numpy().data)
    return checksum


def copied(target: torch.Tensor, source: torch.Tensor) -> bytes:
    """Copies `source` into the contiguous CPU tensor `target` `[rows, width]`; the checksum of what arrived
    there."""
    if target.nbytes <= 2 * _CHUNK or source.device.type != "cpu":
        target.copy_(source)
        return digest(target)
    arrived = target.view(torch.uint8).numpy().data.cast("B")
    rows, row_bytes = target.shape[0], len(arrived) // target.shape[0]
    step = max(1, _CHUNK // row_bytes)
    checksum = xxhash.xxh3_128()
    for begin in range(0, rows, step):
        end = begin + step
        target[begin:end].copy_(source[begin:end])
        checksum.update(arrived[begin * row_bytes : end * row_bytes])
    return bytes(checksum.digest())
