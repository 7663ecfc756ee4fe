"""The tensors of the paged KV cache (PagedAttention, arXiv 2309.06180)."""

from collections.abc import Sequence

import torch

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values


class KVCache:
    """Keys and values of all layers: per layer two tensors `[num_blocks, kv_heads, block_size, head_dim]`.

    A head's tokens of one block lie together, so that gathering a context gives matrices in memory order.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.block_size, self.kv_heads, self.device, self.dtype = block_size, kv_heads, device, dtype
        shape = (num_blocks, kv_heads, block_size, head_dim)
        self.layers = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]

    def blocks(self, block_ids: Sequence[int], length: int) -> Sequence[int]:
        """Those that hold a sequence's first `length` tokens."""
        return block_ids[: -(-length // self.block_size)]

    def token_rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where tokens of `blocks` at `offsets`, `[tokens]` each, lie in a tensor of the cache seen as rows
        of one head's token: `[tokens, kv_heads]`."""
        heads = torch.arange(self.kv_heads, device=blocks.device)
        rows: torch.Tensor = (blocks[:, None] * self.kv_heads + heads) * self.block_size + offsets[:, None]
        return rows

    def like(self, num_blocks: int, dtype: torch.dtype) -> "KVCache":
        """Another one of one layer."""
        head_dim = self.layers[0][0].shape[-1]
        return KVCache(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=self.block_size,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=self.device,
        )


def sent(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device, without waiting for what that is computing: from pageable memory a GPU's driver may."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
