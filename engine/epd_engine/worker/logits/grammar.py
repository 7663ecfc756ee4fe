"""Answers that follow a grammar: llguidance says at each step which tokens may come next."""

from collections.abc import Sequence

import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch.nn.functional import pad

from epd_engine.core.sampling import GrammarState


class LLGrammar:
    """A grammar compiled for a tokenizer of `vocab_size` tokens."""

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def begin(self) -> "LLGrammarState":
        return LLGrammarState(self._matcher.deep_copy(), self._vocab_size)


class LLGrammarState:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self.matcher, self.vocab_size = matcher, vocab_size
        self._num_taken = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in what has been added to the answer `token_ids` since the last call."""
        self.matcher.consume_tokens(list(token_ids[self._num_taken :]))
        self._num_taken = len(token_ids)

    @property
    def problem(self) -> str | None:
        if not self.matcher.is_error():
            return None
        reason = first_line(self.matcher.get_error())
        return f"the answer's grammar cannot be followed any further: {reason}"


class GrammarMasks:
    """Fills the masks of a step, several rows at a time outside Python's lock."""

    def __init__(self) -> None:
        self._executor = LLExecutor()

    def apply(self, logits: torch.Tensor, rows: Sequence[int], states: Sequence[GrammarState]) -> None:
        """Makes every token impossible that the row's grammar does not allow next, and those beyond its
        tokenizer. All states are of one tokenizer."""
        known = states[0].vocab_size
        words = allocate_token_bitmask(len(rows), known)
        fill_next_token_bitmask_par(self._executor, [(s.matcher, at) for at, s in enumerate(states)], words)
        octets = torch.from_numpy(words).to(logits.device).view(torch.uint8)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        allowed = ((octets[:, :, None] >> shifts) & 1).flatten(1)[:, :known].bool()
        allowed = pad(allowed[:, : logits.shape[-1]], (0, max(0, logits.shape[-1] - known)))
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)


def first_line(text: str) -> str:
    """llguidance's reason without the state that it prints below."""
    return text.split("\n", 1)[0][:500]
