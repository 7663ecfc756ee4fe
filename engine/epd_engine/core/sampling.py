"""How a request wants its tokens chosen, and what is said of a chosen token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

GREEDY_BELOW = 1e-5  # a temperature under this is taken for 0, as dividing by it would overflow


class GrammarState(Protocol):
    """Where one answer stands in its grammar."""

    @property
    def matcher(self) -> Any:
        """The library's own object, for the worker that makes masks of it."""

    @property
    def vocab_size(self) -> int:
        """How many tokens a mask is about."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in what has been added to the answer `token_ids` since the last call."""

    @property
    def problem(self) -> str | None:
        """Why the grammar can no longer be followed."""


class Grammar(Protocol):
    """A compiled grammar, shared by requests."""

    def begin(self) -> GrammarState:
        """A state before the first token of an answer."""


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy; `seed` makes a request repeatable whatever runs beside it.

    Order of application: penalties (repetition over prompt and answer, presence and frequency over the
    answer), `logit_bias`, `min_tokens` (no end before so many), grammar; then temperature, `top_k` (0: off),
    `top_p` over what is left, `min_p` as a share of the best token's probability. `logprobs` is how many
    alternatives to report beside each token (None: report nothing), from the model's own distribution before
    any of the above.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the best of the model's own logits is the answer, while `min_tokens` bans nothing."""
        return (
            self.is_greedy
            and not self.has_penalties
            and not self.logit_bias
            and self.logprobs is None
            and self.grammar is None
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities: of the chosen token, and of the likeliest, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
