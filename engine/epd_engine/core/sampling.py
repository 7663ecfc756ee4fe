"""How a request wants its tokens chosen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 is greedy; `seed` makes a request repeatable whatever runs beside it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
