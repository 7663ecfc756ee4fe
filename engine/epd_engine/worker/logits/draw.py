"""Drawing tokens at random.

A row is drawn by inverting its cumulative distribution at one uniform number, so that a token costs one
random number and not one per vocabulary entry. Sorting a vocabulary costs a hundred times what its argmax
does: top-k and top-p look at the best few tokens first, and at more of them only for rows whose share of the
mass lies deeper. What a row gets never depends on the rows beside it.
"""

import hashlib
import random
import struct
from collections.abc import Sequence

import numpy as np
import torch

from epd_engine.core.sampling import SamplingParams

# How many of the best tokens are put in order, where not all need be: the second is for a larger top-k.
PREFIXES = (256, 8192)
OPEN, MASS = 0, -1


def uniform(seed: int | None, position: int) -> float:
    """A number in [0, 1): of a seeded request a function of the seed and the token's place in its answer, the
    same on every device and after a preemption."""
    if seed is None:
        return random.random()
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, wanted: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Token ids `[rows]` int64 from float32 `logits` `[rows, vocab]`, which are overwritten.

    No row is greedy. `uniforms` are in [0, 1), one a row.
    """
    device, vocab = logits.device, logits.shape[-1]
    logits /= torch.tensor([w.temperature for w in wanted], device=device)[:, None]
    limits = _Limits(
        torch.tensor([w.top_k if 0 < w.top_k < vocab else vocab for w in wanted], device=device),
        torch.tensor([w.top_p for w in wanted], device=device),
        torch.tensor([w.min_p for w in wanted], device=device),
        torch.tensor(uniforms, device=device),
    )
    tokens = torch.empty(len(wanted), dtype=torch.int64, device=device)
    for kind, rows in _by_kind(wanted, vocab).items():
        index = torch.tensor(rows, device=device)
        part = logits if len(rows) == len(wanted) else logits[index]
        if kind == OPEN:
            tokens[index] = _draw_open(part, limits.of(index))
        elif kind == MASS:
            tokens[index] = _draw_mass(part, limits.of(index))
        else:
            tokens[index] = _draw_top_k(part, limits.of(index), kind)
    return tokens


class _Limits:
    """Parameters of rows, each `[rows]`; a top-k that is off is the vocabulary's size."""

    def __init__(self, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniforms: torch.Tensor):
        self.top_k, self.top_p, self.min_p, self.uniforms = top_k, top_p, min_p, uniforms

    def of(self, rows: torch.Tensor) -> "_Limits":
        return _Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniforms[rows])


def _by_kind(wanted: Sequence[SamplingParams], vocab: int) -> dict[int, list[int]]:
    """Rows by what they need: nothing ordered, the best by their mass, or at most so many of the best."""
    kinds: dict[int, list[int]] = {}
    for row, params in enumerate(wanted):
        if 0 < params.top_k < vocab:
            kind = next((p for p in PREFIXES if params.top_k <= p < vocab), vocab)
        else:
            kind = MASS if params.top_p < 1 else OPEN
        kinds.setdefault(kind, []).append(row)
    return kinds


def _draw_open(logits: torch.Tensor, limits: _Limits) -> torch.Tensor:
    if bool((limits.min_p > 0).any()):
        floor = logits.amax(-1) + limits.min_p.log()
        logits = logits.masked_fill(logits < floor[:, None], -torch.inf)
    return _invert(torch.softmax(logits, -1), limits.uniforms)


def _draw_top_k(logits: torch.Tensor, limits: _Limits, depth: int) -> torch.Tensor:
    """Every row's top-k is at most `depth`."""
    best, ids = _best(logits, depth)
    beyond = torch.arange(depth, device=logits.device) >= limits.top_k[:, None]
    probabilities = torch.softmax(best.masked_fill(beyond, -torch.inf), -1)
    return _draw_nucleus(probabilities, ids, limits)


def _draw_mass(logits: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """Rows with top-p alone: most find their mass in the best few tokens."""
    probabilities = torch.softmax(logits, -1)
    vocab = logits.shape[-1]
    best, ids = _best(probabilities, PREFIXES[0] if vocab > 4 * PREFIXES[0] else vocab)
    tokens = _draw_nucleus(best, ids, limits)
    deep = (best.sum(-1) < limits.top_p) & (best.shape[-1] < vocab)
    if bool(deep.any()):
        tokens[deep] = _draw_deep(probabilities[deep], limits.of(deep))
    return tokens


def _draw_deep(probabilities: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """Rows so flat that their nucleus goes deep. A GPU sorts them; a CPU is much faster without."""
    if probabilities.device.type != "cpu":
        return _draw_nucleus(*_best(probabilities, probabilities.shape[-1]), limits)
    floors = [
        _nucleus_floor(row, p) for row, p in zip(probabilities.numpy(), limits.top_p.tolist(), strict=True)
    ]
    floor = torch.maximum(torch.tensor(floors), limits.min_p * probabilities.amax(-1))
    return _invert(probabilities.masked_fill(probabilities < floor[:, None], 0), limits.uniforms)


def _nucleus_floor(row: np.ndarray, top_p: float) -> float:
    """The largest value such that what is not below it in float32 `row` `[vocab]` has a mass of `top_p`.

    The bits of positive floats are in the values' order: their upper ones make a histogram of the mass, and
    only what falls into the bucket where it reaches `top_p` is sorted.
    """
    buckets = row.view(np.int32) >> 16
    buckets -= buckets.min()
    mass = np.bincount(buckets, weights=row)[::-1]
    reached = mass.cumsum()
    place = min(int(np.searchsorted(reached, top_p)), len(mass) - 1)
    inside = np.sort(row[buckets == len(mass) - 1 - place])[::-1]
    above = reached[place] - mass[place]
    last = int(np.searchsorted(above + inside.cumsum(dtype=np.float64), top_p))
    return float(inside[min(last, len(inside) - 1)])


def _best(values: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `depth` largest of each row, in order, and where they are."""
    if depth == values.shape[-1]:
        ordered, ids = values.sort(stable=True, dim=-1, descending=True)
    else:
        ordered, ids = values.topk(depth, -1)
    return ordered, ids


def _draw_nucleus(probabilities: torch.Tensor, ids: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """From the smallest set of tokens that holds `top_p` of the mass (arXiv 1904.09751), less those under
    `min_p` of the best (arXiv 2407.01082). Columns are in descending order."""
    before = probabilities.cumsum(-1) - probabilities
    out = (before >= limits.top_p[:, None]) | (probabilities < limits.min_p[:, None] * probabilities[:, :1])
    out[:, 0] = False
    column = _invert(probabilities.masked_fill(out, 0), limits.uniforms)
    return ids.gather(-1, column[:, None])[:, 0]


def _invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first column whose cumulative share exceeds the row's uniform number."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, target[:, None], right=True)
    column = column.clamp_(max=probabilities.shape[-1] - 1)
    # A parallel sum may waver by a rounding error and point at a token that was ruled out.
    impossible = probabilities.gather(-1, column) <= 0
    if bool(impossible.any()):
        column = torch.where(impossible, probabilities.argmax(-1, keepdim=True), column)
    return column[:, 0]
