from collections import Counter

import torch

from epd_engine.core.request import Request
from epd_engine.core.sampling import SamplingParams
from epd_engine.worker.sampler import Sampler
from tests.support.engine_objects import request

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])


def wanting(**sampling: object) -> Request:
    made = request("r", 4)
    made.sampling = SamplingParams(max_tokens=4, **sampling)  # type: ignore[arg-type]
    return made


def test_temperature_zero_is_greedy() -> None:
    assert Sampler().sample(wanting(temperature=0), LOGITS) == 1


def test_a_seed_repeats_whatever_runs_beside_it() -> None:
    def draw(noise: bool) -> list[int]:
        sampler, seeded = Sampler(), wanting(temperature=1.0, seed=7)
        tokens = []
        for _ in range(20):
            if noise:
                torch.rand(3)
            tokens.append(sampler.sample(seeded, LOGITS))
        return tokens

    assert draw(False) == draw(True)
    assert len(set(draw(False))) > 1


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    sampler, nucleus = Sampler(), wanting(temperature=1.0, top_p=0.7, seed=1)
    assert {sampler.sample(nucleus, LOGITS) for _ in range(300)} == {1, 2}


def test_frequencies_follow_the_distribution() -> None:
    sampler, warm = Sampler(), wanting(temperature=2.0, seed=3)
    counts = Counter(sampler.sample(warm, LOGITS) for _ in range(4000))
    wanted = torch.softmax(LOGITS / 2.0, -1)
    for token, share in enumerate(wanted.tolist()):
        assert abs(counts[token] / 4000 - share) < 0.04
