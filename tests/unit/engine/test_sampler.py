"""The sampler against a slow reference: transformers' processors, one row at a time."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from epd_engine.core.request import Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.worker import sampler as sampler_module
from epd_engine.worker.logits import draw as draw_module
from epd_engine.worker.logits.draw import uniform
from epd_engine.worker.sampler import SampleOutput, Sampler
from tests.support.engine_objects import request

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])
VOCAB = 60


def wanting(name: str = "r", output: Sequence[int] = (), **sampling: object) -> Request:
    made = request(name, 4)
    made.sampling = SamplingParams(max_tokens=99, **sampling)  # type: ignore[arg-type]
    made.output_token_ids = list(output)
    return made


def sample(requests: Sequence[Request], logits: torch.Tensor) -> SampleOutput:
    return Sampler().sample(requests, logits.clone())


def draws(wanted: Request, logits: torch.Tensor, times: int) -> list[int]:
    """Tokens at successive places of a seeded answer whose logits stay the same."""
    sampler, tokens = Sampler(), []
    for _ in range(times):
        tokens.append(sampler.sample([wanted], logits[None].clone()).tokens[0])
        wanted.output_token_ids.append(tokens[-1])
    return tokens


# What transformers makes of a row, and presence and frequency by their definition


def reference_logits(wanted: Request, row: torch.Tensor) -> torch.Tensor:
    params, row = wanted.sampling, row.clone().float()
    ids = torch.tensor([wanted.prompt_token_ids + wanted.output_token_ids])
    if params.repetition_penalty != 1:
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row[None])[0]
    for token, count in Counter(wanted.output_token_ids).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(wanted.output_token_ids) < params.min_tokens:
        row[[t for t in wanted.eos_token_ids if t >= 0]] = -torch.inf
    return row


def reference_probabilities(wanted: Request, row: torch.Tensor) -> torch.Tensor:
    params, scores = wanted.sampling, reference_logits(wanted, row)[None]
    ids = torch.tensor([wanted.prompt_token_ids])
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        # Its share of the best is the same before and after the others are cut off.
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores, -1)[0]


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, object]:
    def maybe(strategy: st.SearchStrategy, off: object) -> object:
        return draw(st.one_of(st.just(off), strategy))

    return {
        "temperature": maybe(st.floats(0.2, 2), 0.0),
        "top_k": maybe(st.integers(1, VOCAB + 5), 0),
        "top_p": maybe(st.floats(0.05, 0.99), 1.0),
        "min_p": maybe(st.floats(0.01, 0.9), 0.0),
        "repetition_penalty": maybe(st.floats(0.5, 2), 1.0),
        "presence_penalty": maybe(st.floats(-2, 2), 0.0),
        "frequency_penalty": maybe(st.floats(-2, 2), 0.0),
        "logit_bias": maybe(
            st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), min_size=1, max_size=4), {}
        ),
        "min_tokens": maybe(st.integers(1, 6), 0),
        "logprobs": maybe(st.integers(0, 5), None),
        "seed": maybe(st.integers(-(2**63), 2**63 - 1), None),
        "output": draw(st.lists(st.integers(0, VOCAB - 1), max_size=8)),
    }


def batch_of(all_wishes: Sequence[dict]) -> list[Request]:
    made = [wanting(f"r{i}", **wish) for i, wish in enumerate(all_wishes)]
    for one in made:
        one.eos_token_ids = frozenset({7, 11, -1})
    return made


@settings(deadline=None, max_examples=150)
@given(
    st.lists(wishes(), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.sampled_from([(4, 16), (60, 60)]),
    st.sampled_from([1, 3 * VOCAB, 1 << 21]),
)
def test_a_batch_gets_what_each_row_asks_for(
    all_wishes: list[dict], noise: int, prefixes: tuple[int, int], block: int
) -> None:
    logits = torch.randn(len(all_wishes), VOCAB, generator=torch.Generator().manual_seed(noise)) * 3
    requests = batch_of(all_wishes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "PREFIXES", prefixes)
        patch.setattr(sampler_module, "BLOCK", block)
        output = sample(requests, logits)
        for row, wanted in enumerate(requests):
            if wanted.sampling.is_greedy:
                assert output.tokens[row] == int(reference_logits(wanted, logits[row]).argmax())
            else:
                share = reference_probabilities(wanted, logits[row])[output.tokens[row]]
                assert share > 0, "a token that transformers would never choose"
            if wanted.sampling.seed is not None:
                alone = batch_of(all_wishes)[row]
                assert sample([alone], logits[row][None]).tokens == [output.tokens[row]]
    assert set(output.logprobs) == {
        row for row, wanted in enumerate(requests) if wanted.sampling.logprobs is not None
    }


@settings(deadline=None, max_examples=25)
@given(wishes(), st.integers(0, 2**31), st.sampled_from([(4, 16), (60, 60)]))
def test_the_distribution_is_transformers(wish: dict, noise: int, prefixes: tuple[int, int]) -> None:
    """Every share of the unit interval is the token's probability: read off at a fine grid of numbers."""
    wish = {**wish, "temperature": wish["temperature"] or 1.0}
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(noise)) * 3
    wanted = batch_of([wish])[0]
    adjusted, grid = reference_logits(wanted, row), 4000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "PREFIXES", prefixes)
        tokens = draw_module.draw(
            adjusted.repeat(grid, 1), [wanted.sampling] * grid, [(i + 0.5) / grid for i in range(grid)]
        )
    got = torch.bincount(tokens, minlength=VOCAB) / grid
    assert torch.allclose(got, reference_probabilities(wanted, row), atol=2 / grid)


@settings(deadline=None, max_examples=60)
@given(st.lists(wishes(), min_size=1, max_size=4), st.integers(0, 2**31))
def test_logprobs_are_those_of_the_model_itself(all_wishes: list[dict], noise: int) -> None:
    logits = torch.randn(len(all_wishes), VOCAB, generator=torch.Generator().manual_seed(noise)) * 3
    output = sample(batch_of([{**wish, "logprobs": 3} for wish in all_wishes]), logits)
    wanted = torch.log_softmax(logits, -1)
    for row, said in output.logprobs.items():
        assert said.chosen == pytest.approx(float(wanted[row, output.tokens[row]]), abs=1e-5)
        best = wanted[row].topk(3)
        assert [token for token, _ in said.top] == best.indices.tolist()
        assert [value for _, value in said.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_penalties_follow_an_answer_as_it_grows() -> None:
    penalised = wanting(temperature=0, frequency_penalty=0.6, presence_penalty=0.5, repetition_penalty=1.3)
    sampler, logits = Sampler(), torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    for _ in range(40):
        token = sampler.sample([penalised], logits[None].clone()).tokens[0]
        assert token == int(reference_logits(penalised, logits).argmax())
        penalised.output_token_ids.append(token)


def test_rows_that_ask_for_nothing_are_one_argmax_and_leave_no_state() -> None:
    sampler = Sampler()
    requests = [wanting(str(i), temperature=0) for i in range(3)]
    logits = torch.randn(3, VOCAB).bfloat16()
    before = logits.clone()
    assert sampler.sample(requests, logits).tokens == before.argmax(-1).tolist()
    assert torch.equal(logits, before)
    assert not sampler._rows


def test_what_is_known_of_a_request_is_forgotten_with_it() -> None:
    sampler = Sampler()
    sampler.sample([wanting(temperature=1.0)], LOGITS[None].clone())
    sampler.forget("r")
    assert not sampler._rows


def test_a_seed_repeats_whatever_runs_beside_it() -> None:
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(2))

    def answer(company: int) -> list[int]:
        sampler, seeded = Sampler(), wanting("seeded", temperature=1.5, seed=7, top_p=0.9)
        others = [
            wanting(str(i), temperature=[0, 1.0, 2.0][i % 3], top_k=[0, 5][i % 2]) for i in range(company)
        ]
        for step in range(50):
            rows = torch.cat([logits[step : step + 1], torch.randn(company, VOCAB)])
            seeded.output_token_ids.append(sampler.sample([seeded, *others], rows).tokens[0])
        return seeded.output_token_ids

    assert answer(0) == answer(5)
    assert len(set(answer(0))) > 5


def test_an_answer_without_a_seed_differs_each_time() -> None:
    flat = torch.zeros(VOCAB)
    assert draws(wanting(temperature=1.0), flat, 20) != draws(wanting(temperature=1.0), flat, 20)


def test_frequencies_follow_the_distribution() -> None:
    counts = Counter(draws(wanting(temperature=2.0, seed=3), LOGITS, 4000))
    for token, share in enumerate(torch.softmax(LOGITS / 2.0, -1).tolist()):
        assert abs(counts[token] / 4000 - share) < 0.04


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    assert set(draws(wanting(temperature=1.0, top_p=0.7, seed=1), LOGITS, 300)) == {1, 2}


def test_uniform_numbers_are_in_range_and_of_their_seed() -> None:
    numbers = [uniform(seed, place) for seed in (0, -1, 2**63 - 1) for place in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert 0.4 < sum(numbers) / len(numbers) < 0.6


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_never_choose_an_impossible_token(number: float) -> None:
    row = torch.full((1, 1000), -torch.inf)
    row[0, 400:600] = torch.randn(200)
    for params in ({}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}):
        wanted = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
        token = int(draw_module.draw(row.clone(), [wanted], [number])[0])
        assert 400 <= token < 600


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_deep_nucleus_is_the_one_that_sorting_finds(spread: float, rounded: bool) -> None:
    """Also where half precision makes many tokens equal: then all of the least likely kind are in."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * spread
    row = torch.softmax(logits.bfloat16().float() if rounded else logits, -1)
    ordered = row.double().sort(descending=True).values
    for top_p in (0.01, 0.5, 0.9, 0.999):
        floor = draw_module._nucleus_floor(row.numpy(), top_p)
        before = float(ordered[ordered > floor].sum())
        assert before < top_p <= float(ordered[ordered >= floor].sum()) + 1e-9
