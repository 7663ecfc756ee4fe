"""Log probabilities of chosen and of likeliest tokens, from the model's own distribution."""

from collections.abc import Sequence

import torch

from epd_engine.core.sampling import TokenLogprobs


class RawLogprobs:
    """Made from logits before anything changes them; read once the tokens are chosen."""

    def __init__(self, logits: torch.Tensor, num_top: Sequence[int]):
        """`logits` float32 `[rows, vocab]` of the rows that report; `num_top[row]` alternatives each."""
        self._all = torch.log_softmax(logits, -1)
        self._num_top = num_top
        self._top = self._all.topk(min(max(num_top), logits.shape[-1]), -1)

    def of(self, tokens: torch.Tensor) -> list[TokenLogprobs]:
        """What to report of `tokens` `[rows]`."""
        chosen = self._all.gather(-1, tokens[:, None])[:, 0].tolist()
        values, ids = self._top.values.tolist(), self._top.indices.tolist()
        return [
            TokenLogprobs(value, tuple(zip(ids[row][:num], values[row][:num], strict=True)))
            for row, (value, num) in enumerate(zip(chosen, self._num_top, strict=True))
        ]
