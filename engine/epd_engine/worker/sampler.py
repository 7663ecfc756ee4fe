"""Choosing tokens from logits, for all rows of a step at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from epd_engine.core.request import Request
from epd_engine.core.sampling import GrammarState, TokenLogprobs
from epd_engine.worker.logits.draw import draw, uniform
from epd_engine.worker.logits.logprobs import RawLogprobs
from epd_engine.worker.logits.penalties import TokenCounts, apply_penalties
from epd_engine.worker.logits.sparse import add_bias, ban

if TYPE_CHECKING:
    from epd_engine.worker.logits.grammar import GrammarMasks

# Logits that a CPU works on at once: temporaries of this size stay near the caches and are not mapped anew.
BLOCK = 1 << 21


@dataclass
class SampleOutput:
    """A token id for each row; what some rows report beside it; why a row's token is worth nothing."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Keeps what it must know of a request between its tokens, until `forget`.

    Rows that ask for nothing share one argmax, and are not looked at again.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    @cached_property
    def _masks(self) -> "GrammarMasks":
        from epd_engine.worker.logits.grammar import GrammarMasks  # loaded only where it is used

        return GrammarMasks()

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> SampleOutput:
        """Tokens from `logits` `[rows, vocab]`, which may be overwritten, one row a request."""
        special = [row for row, request in enumerate(requests) if not _is_plain(request)]
        if not special:
            return SampleOutput(logits.argmax(-1).tolist())
        all_special = len(special) == len(requests)
        output = SampleOutput([0] * len(requests) if all_special else logits.argmax(-1).tolist())
        size = max(1, BLOCK // logits.shape[-1]) if logits.device.type == "cpu" else len(special)
        for begin in range(0, len(special), size):
            places = special[begin : begin + size]
            part = logits[begin : begin + size] if all_special else _take(logits, places)
            self._choose(
                [self._row(requests[row]) for row in places], part.float().contiguous(), places, output
            )
        return output

    def forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)

    def _row(self, request: Request) -> "_Row":
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._rows[request.request_id] = _Row(request)
        return row

    def _choose(
        self, rows: Sequence["_Row"], logits: torch.Tensor, places: Sequence[int], output: SampleOutput
    ) -> None:
        """Writes the token of `rows[i]` to `places[i]` of `output`."""
        reporting = [i for i, row in enumerate(rows) if row.wanted.logprobs is not None]
        report = None
        if reporting:
            report = RawLogprobs(_take(logits, reporting), [rows[i].wanted.logprobs or 0 for i in reporting])
        self._adjust(rows, logits, places, output)
        tokens = _tokens(rows, logits)
        if report is not None:
            for i, said in zip(reporting, report.of(_take(tokens, reporting)), strict=True):
                output.logprobs[places[i]] = said
        for place, token in zip(places, tokens.tolist(), strict=True):
            output.tokens[place] = token

    def _adjust(
        self, rows: Sequence["_Row"], logits: torch.Tensor, places: Sequence[int], output: SampleOutput
    ) -> None:
        """Everything that changes which token is the best."""
        if penalised := [(i, row) for i, row in enumerate(rows) if row.counts is not None]:
            counts = [row.counted() for _, row in penalised]
            apply_penalties(logits, [i for i, _ in penalised], counts, [row.wanted for _, row in penalised])
        if biased := [(i, row) for i, row in enumerate(rows) if row.wanted.logit_bias]:
            ids, values = zip(*(row.bias for _, row in biased), strict=True)
            add_bias(logits, [i for i, _ in biased], ids, values)
        if early := [(i, row) for i, row in enumerate(rows) if _is_early(row.request)]:
            ban(logits, [i for i, _ in early], [row.ends(logits.shape[-1]) for _, row in early])
        if guided := [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None]:
            for i, state in guided:
                state.advance(rows[i].request.output_token_ids)
            self._masks.apply(logits, [i for i, _ in guided], [state for _, state in guided])
            for i, state in guided:
                if state.problem is not None:
                    output.problems[places[i]] = state.problem


class _Row:
    """What a request's tokens are chosen by, beyond the logits."""

    def __init__(self, request: Request):
        self.request, self.wanted = request, request.sampling
        self.counts = TokenCounts(request) if self.wanted.has_penalties else None
        self.grammar: GrammarState | None = self.wanted.grammar.begin() if self.wanted.grammar else None

    @cached_property
    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        bias = self.wanted.logit_bias
        return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)

    def counted(self) -> TokenCounts:
        assert self.counts is not None, "only rows with penalties are counted"
        self.counts.take_in(self.request.output_token_ids)
        return self.counts

    def ends(self, vocab: int) -> np.ndarray:
        return np.array([t for t in self.request.eos_token_ids if 0 <= t < vocab], np.int64)

    @property
    def uniform(self) -> float:
        return uniform(self.wanted.seed, len(self.request.output_token_ids))


def _is_early(request: Request) -> bool:
    """Whether the answer may not end yet."""
    return len(request.output_token_ids) < request.sampling.min_tokens


def _is_plain(request: Request) -> bool:
    return request.sampling.is_plain and not _is_early(request)


def _tokens(rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
    """Token ids `[rows]`: the best of greedy rows, a draw of the others."""
    random = [i for i, row in enumerate(rows) if not row.wanted.is_greedy]
    if not random:
        return logits.argmax(-1)
    drawn = draw(_take(logits, random), [rows[i].wanted for i in random], [rows[i].uniform for i in random])
    if len(random) == len(rows):
        return drawn
    greedy = [i for i, row in enumerate(rows) if row.wanted.is_greedy]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    tokens[torch.tensor(random, device=logits.device)] = drawn
    tokens[torch.tensor(greedy, device=logits.device)] = _take(logits, greedy).argmax(-1)
    return tokens


def _take(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows as a copy, or all as they are."""
    if len(rows) == len(values):
        return values
    return values[torch.tensor(rows, device=values.device)]
