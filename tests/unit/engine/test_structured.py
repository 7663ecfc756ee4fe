"""Grammars: compiled once, bounded, and followed as masks over the logits."""

import json

import pytest
import torch

from epd_engine.core.request import Request, RequestError
from epd_engine.core.sampling import SamplingParams
from epd_engine.models.checkpoint import Checkpoint
from epd_engine.server import structured
from epd_engine.server.protocol import SamplingFields
from epd_engine.server.text import ChatTokenizer
from epd_engine.worker.logits.grammar import LLGrammar
from epd_engine.worker.sampler import Sampler
from tests.support.digits import MODEL
from tests.support.engine_objects import request

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(Checkpoint(MODEL))


def compiled(tokenizer: ChatTokenizer, **fields: object) -> LLGrammar:
    grammar = tokenizer._grammars.compile(SamplingFields.model_validate(fields))
    assert grammar is not None
    return grammar


def guided(grammar: LLGrammar | None, name: str = "g", **sampling: object) -> Request:
    made = request(name, 3)
    made.eos_token_ids = frozenset({EOS})
    made.sampling = SamplingParams(max_tokens=200, grammar=grammar, **sampling)  # type: ignore[arg-type]
    return made


def answer(wanted: Request, *, width: int = 512, noise: int = 0) -> list[int]:
    """Tokens up to the end, from logits that are noise."""
    sampler, generator = Sampler(), torch.Generator().manual_seed(noise)
    while EOS not in wanted.output_token_ids and len(wanted.output_token_ids) < 200:
        output = sampler.sample([wanted], torch.randn(1, width, generator=generator) * 4)
        assert not output.problems
        wanted.output_token_ids.append(output.tokens[0])
    return wanted.output_token_ids


@pytest.mark.parametrize("noise", range(6))
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_noise_becomes_what_the_schema_says(tokenizer: ChatTokenizer, noise: int, temperature: float) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": -99}, "b": {"enum": ["x", None]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    wanted = guided(compiled(tokenizer, guided_json=schema), temperature=temperature)
    read = json.loads(tokenizer.decode(answer(wanted, noise=noise)))
    assert -99 <= read["a"] <= 99
    assert read["b"] in ("x", None)


def test_rows_follow_their_own_grammars_and_others_none(tokenizer: ChatTokenizer) -> None:
    rows = [
        guided(compiled(tokenizer, guided_regex="[0-9]{3}"), "digits", temperature=0.0),
        guided(None, "free", temperature=0.0),
        guided(compiled(tokenizer, guided_choice=["seven"]), "word", temperature=1.0),
        guided(None, "hot", temperature=1.0, logprobs=1),
    ]
    sampler, logits = Sampler(), torch.randn(4, 512)
    best = int(logits[1].argmax())
    chosen = sampler.sample(rows, logits.clone()).tokens
    assert tokenizer.decode(chosen[:1]) in set("0123456789")
    assert chosen[1] == best
    assert "seven".startswith(tokenizer.decode(chosen[2:3]))


def test_a_state_goes_on_from_tokens_that_were_chosen_before(tokenizer: ChatTokenizer) -> None:
    """As after a preemption, or where the first tokens came from elsewhere."""
    grammar = compiled(tokenizer, guided_regex="[0-9]{3}")
    begun = answer(guided(grammar, temperature=0.0))[:2]
    resumed = guided(grammar, temperature=0.0)
    resumed.output_token_ids = list(begun)
    assert len(tokenizer.decode(answer(resumed, noise=3))) == 3


def test_logits_wider_than_the_tokenizer_never_give_a_token_it_lacks(tokenizer: ChatTokenizer) -> None:
    wanted = guided(compiled(tokenizer, guided_regex="[a-z]{5}"), temperature=0.0)
    assert max(answer(wanted, width=520)) < 512
    wanted = guided(compiled(tokenizer, guided_regex="[a-z]{5}"), temperature=0.0)
    assert max(answer(wanted, width=500)) < 500


def test_a_grammar_that_cannot_go_on_is_a_problem_of_its_row_alone(tokenizer: ChatTokenizer) -> None:
    rows = [
        guided(compiled(tokenizer, guided_regex=r"[^\s\S]"), "stuck"),
        guided(compiled(tokenizer, guided_regex="a+"), "fine"),
    ]
    output = Sampler().sample(rows, torch.randn(2, 512))
    assert "cannot be followed" in output.problems[0]
    assert set(output.problems) == {0}


def test_a_grammar_is_compiled_once_and_the_last_used_ones_are_kept(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MAX_KEPT", 3)
    first = compiled(tokenizer, guided_regex="first")
    for name in ("second", "third"):
        compiled(tokenizer, guided_regex=name)
    assert compiled(tokenizer, guided_regex="first") is first
    for name in ("fourth", "fifth"):
        compiled(tokenizer, guided_regex=name)
    assert len(tokenizer._grammars._kept) == 3
    assert compiled(tokenizer, guided_regex="first") is first
    second = compiled(tokenizer, guided_regex="second")
    assert second is not first


def test_a_schema_cannot_change_how_it_is_compiled(tokenizer: ChatTokenizer) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="uniqueItems") as caught:
        compiled(tokenizer, guided_json=schema)
    assert (caught.value.status, caught.value.param) == (400, "guided_json")


def test_white_space_between_tokens_of_json_has_an_end(tokenizer: ChatTokenizer) -> None:
    wanted = guided(compiled(tokenizer, guided_json={"type": "array", "items": {"const": 1}, "maxItems": 1}))
    space = tokenizer._tokenizer.convert_tokens_to_ids("Ġ")
    logits = torch.zeros(1, 512)
    logits[0, space] = 100
    sampler = Sampler()
    for _ in range(200):
        wanted.output_token_ids.append(sampler.sample([wanted], logits.clone()).tokens[0])
        if wanted.output_token_ids[-1] == EOS:
            break
    assert wanted.output_token_ids[-1] == EOS


def test_a_model_without_an_end_token_refuses_structures(tokenizer: ChatTokenizer) -> None:
    endless = ChatTokenizer.__new__(ChatTokenizer)
    endless.__dict__.update({**tokenizer.__dict__, "eos_token_ids": frozenset()})
    compiler = structured.GrammarCompiler(endless._grammar_tokenizer)
    with pytest.raises(RequestError, match="which this model lacks"):
        compiler.compile(SamplingFields(guided_regex="a"))
