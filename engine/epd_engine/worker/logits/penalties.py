"""Repetition, presence and frequency penalties over the tokens that a request has seen."""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from epd_engine.core.request import Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.worker.logits.sparse import flat_index, per_entry


class TokenCounts:
    """How often each token occurs in a request's answer; tokens of its prompt alone count 0.

    Kept as it grows, so that a step costs one update and not a pass over the text.
    """

    def __init__(self, request: Request):
        seen = dict.fromkeys(request.prompt_token_ids) if request.sampling.repetition_penalty != 1 else {}
        self._place = {token: at for at, token in enumerate(seen)}
        self._ids = array("q", self._place)
        self._counts = array("f", bytes(4 * len(seen)))
        self._num_counted = 0

    def take_in(self, output_token_ids: Sequence[int]) -> None:
        """Counts what has been added to the answer since the last call."""
        for token in output_token_ids[self._num_counted :]:
            at = self._place.setdefault(token, len(self._ids))
            if at == len(self._ids):
                self._ids.append(token)
                self._counts.append(0.0)
            self._counts[at] += 1
        self._num_counted = len(output_token_ids)

    @property
    def ids(self) -> np.ndarray:
        """int64 `[seen]`; a copy, as a view would keep the array from growing."""
        return np.array(self._ids, np.int64)

    @property
    def counts(self) -> np.ndarray:
        """float32 `[seen]`, beside `ids`."""
        return np.array(self._counts, np.float32)


def apply_penalties(
    logits: torch.Tensor,
    rows: Sequence[int],
    counts: Sequence[TokenCounts],
    wanted: Sequence[SamplingParams],
) -> None:
    """In place. Repetition divides positive logits and multiplies negative ones (arXiv 1909.05858); presence
    and frequency are subtracted, as OpenAI's API describes."""
    ids, device = [c.ids for c in counts], logits.device
    index = flat_index(rows, ids, logits)
    occurrences = torch.from_numpy(np.concatenate([c.counts for c in counts])).to(device)
    repetition = per_entry([w.repetition_penalty for w in wanted], ids, device)
    presence = per_entry([w.presence_penalty for w in wanted], ids, device)
    frequency = per_entry([w.frequency_penalty for w in wanted], ids, device)
    values = logits.view(-1)[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurrences + presence * (occurrences > 0)
    logits.view(-1)[index] = values
