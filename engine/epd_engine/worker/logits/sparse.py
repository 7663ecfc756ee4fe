"""Changes to few entries of many rows, as one operation."""

from collections.abc import Sequence

import numpy as np
import torch


def flat_index(rows: Sequence[int], ids: Sequence[np.ndarray], logits: torch.Tensor) -> torch.Tensor:
    """Where token `ids[i]` of row `rows[i]` lie in `logits.view(-1)`: int64, in order."""
    width = logits.shape[-1]
    flat = np.concatenate([part + row * width for row, part in zip(rows, ids, strict=True)])
    return torch.from_numpy(flat).to(logits.device)


def per_entry(values: Sequence[float], ids: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """`values[i]` once for each entry of `ids[i]`: float32."""
    repeated = np.repeat(np.asarray(values, np.float32), [len(part) for part in ids])
    return torch.from_numpy(repeated).to(device)


def ban(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[np.ndarray]) -> None:
    """Makes the tokens impossible."""
    logits.view(-1)[flat_index(rows, ids, logits)] = -torch.inf


def add_bias(
    logits: torch.Tensor, rows: Sequence[int], ids: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> None:
    """Adds `values[i]` to the logits of tokens `ids[i]`, each named once, in row `rows[i]`."""
    added = torch.from_numpy(np.concatenate(values)).to(logits.device)
    logits.view(-1)[flat_index(rows, ids, logits)] += added
