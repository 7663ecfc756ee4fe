"""Token parity with plain transformers through chunks, preemption, prefix hits and role splits, in process.

Two models: the shipped one, and one of random weights with 15 million parameters; one of 108 million for all
of it at once. Greedy and in float32 a differing token passes only where the reference itself is undecided;
half precision is judged by the error of the logarithms of probabilities.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from benchmarks.make_model import make

from epd_engine.engine import DTYPES
from epd_engine.layers.packed_linear import PackedLinear
from tests.support.conversations import Conversations, Messages, described, noise
from tests.support.digits import MODEL, Reference, assert_same_tokens, user
from tests.support.in_process import Answered, InProcess, through

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 8
ASKED: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
CONTEXT = 384
# Enough for all requests of a test at once, and so that pictures are evicted.
ROOMY: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "kv_cache_tokens": 40_000,
    "max_num_seqs": 256,
    "encoder_cache_size": 128,
}


class Known:
    """A model, and plain transformers on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.reference = Reference(folder)

    def assert_same(self, conversations: Sequence[Messages], answers: Sequence[Answered]) -> None:
        """Shows every chat that was answered otherwise."""
        wrong = []
        for messages, answer in zip(conversations, answers, strict=True):
            assert len(answer.ids) == TOKENS
            wanted = self.reference.follow(messages, answer.ids)
            try:
                assert answer.request.prompt_token_ids == wanted.prompt_ids, "the prompts differ"
                assert_same_tokens(answer.ids, wanted)
            except AssertionError as error:
                said = f"  ours {answer.ids}, transformers' {wanted.ids}"
                reason = str(error).split("\n")[0]
                wrong.append(f"{answer.request.request_id}: {reason}\n{described(messages)}\n{said}")
        assert not wrong, f"{len(wrong)} of {len(answers)} chats differ:\n" + "\n".join(wrong)


@pytest.fixture(scope="module", params=["digits", "random"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    if request.param == "digits":
        return Known(MODEL)
    folder = tmp_path_factory.mktemp("models") / "small"
    make(folder, "qwen2_5_vl", "small", seed=3)
    return Known(folder)


@pytest.fixture(scope="module")
def mixed() -> list[Messages]:
    return Conversations(seed=1).take(200)


@pytest.fixture
def started(known: Known) -> Iterator[Any]:
    """Makes engines on the model that end with the test."""
    made: list[InProcess] = []

    def start(**config: Any) -> InProcess:
        made.append(InProcess(known.folder, **config))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_two_hundred_mixed_requests_in_flight_together(
    known: Known, mixed: list[Messages], started: Any
) -> None:
    engine = started(**ROOMY)
    answers = engine.ask(mixed, **ASKED)
    known.assert_same(mixed, answers)
    assert len({tuple(answer.ids) for answer in answers}) > 20, "the model hardly listens"


@pytest.mark.parametrize(("chunk", "count"), [(1, 4), (7, 24), (64, 48)])
def test_prompts_in_chunks(known: Known, mixed: list[Messages], started: Any, chunk: int, count: int) -> None:
    engine = started(**ROOMY, max_num_batched_tokens=chunk)
    known.assert_same(mixed[:count], engine.ask(mixed[:count], **ASKED))


def test_preemption_for_lack_of_kv_blocks(known: Known, mixed: list[Messages], started: Any) -> None:
    engine = started(**ROOMY | {"kv_cache_tokens": CONTEXT}, max_num_batched_tokens=64)
    known.assert_same(mixed[:64], engine.ask(mixed[:64], **ASKED))
    assert engine.preemptions > 0


def test_beginnings_that_are_known_already(known: Known, started: Any) -> None:
    """Chats grow by a turn, and their beginnings, pictures and all, are taken over; another picture of the
    same size in the same place is another beginning."""
    text = "What digit is this? Please answer in one word, and do not say why."
    starts = [[user(noise(84, 84, seed), text)] for seed in range(6)]
    longer = [
        [
            *messages,
            {"role": "assistant", "content": "It is a three."},
            user(noise(56, 56, seed), "And this?"),
        ]
        for seed, messages in enumerate(starts)
    ]
    engine = started(**ROOMY, block_size=4)
    for chats, hits in ((starts, False), (longer, True), (starts, True), (longer + starts, True)):
        before = engine.engine.stats.cached_prompt_tokens
        known.assert_same(chats, engine.ask(chats, **ASKED))
        cached = engine.engine.stats.cached_prompt_tokens - before
        assert (cached > 9 * len(chats)) == hits, f"{cached} tokens of {len(chats)} chats were known"


def test_priorities(known: Known, mixed: list[Messages], started: Any) -> None:
    """Who is urgent takes the place of who is not, in the middle of an answer."""
    engine = started(**ROOMY | {"kv_cache_tokens": CONTEXT, "max_num_seqs": 8}, max_num_batched_tokens=48)
    chats = mixed[64:104]
    bodies = [
        {"messages": messages, "temperature": 0, **ASKED, "priority": -(n % 5)}
        for n, messages in enumerate(chats)
    ]
    known.assert_same(chats, engine.run(engine.build(bodies)))


def test_an_encoder_and_a_pd(known: Known, mixed: list[Messages], started: Any, tmp_path: Path) -> None:
    encoder = started(role="ec_producer", store=tmp_path)
    pd = started(**ROOMY, role="ec_consumer", store=tmp_path, max_num_batched_tokens=128)
    chats = mixed[104:152]
    known.assert_same(chats, pd.ask(through(encoder, chats), **ASKED))
    assert pd.engine.stats.ec_loads > 0
    assert pd.engine.runner.encoder.items_encoded == 0


@pytest.mark.parametrize(("dtype", "chunk"), [("bfloat16", 7), ("bfloat16", 2048), ("float16", 64)])
def test_half_precision_errs_no_more_than_transformers_does(
    known: Known, mixed: list[Messages], started: Any, dtype: Literal["bfloat16", "float16"], chunk: int
) -> None:
    """With linear layers packed; judged along our own answer, by transformers in float32."""
    engine = started(**ROOMY, dtype=dtype, max_num_batched_tokens=chunk)
    packed = sum(
        isinstance(m, PackedLinear) for part in engine.engine.family.modules() for m in part.modules()
    )
    assert packed > 10 or dtype == "float16", "this machine's torch packs nothing"
    chats = mixed[152:168]
    vocab = known.reference.model.config.get_text_config().vocab_size
    requests = engine.build([{"messages": m, "temperature": 0, **ASKED} for m in chats])
    for request in requests:
        request.sampling = replace(request.sampling, logprobs=vocab)
    answers = engine.run(requests)
    ours, theirs = [], []
    half = Reference(known.folder, DTYPES[dtype])
    for messages, answer in zip(chats, answers, strict=True):
        exact, rounded = (
            torch.log_softmax(reference.logits(messages, answer.ids)[1], dim=-1)
            for reference in (known.reference, half)
        )
        ours.append(_logprobs(answer, vocab) - exact)
        theirs.append(rounded - exact)
    our_error, their_error = (torch.cat(e).square().mean().sqrt().item() for e in (ours, theirs))
    assert our_error < 1.25 * their_error, (
        f"root mean square {our_error:.4g}, transformers' {their_error:.4g}"
    )


def test_a_hundred_million_parameters(mixed: list[Messages], tmp_path: Path) -> None:
    """In chunks, preempted, with beginnings known the second time, and split in two."""
    make(tmp_path / "model", "qwen2_5_vl", "100m", seed=7)
    known, store = Known(tmp_path / "model"), tmp_path / "store"
    narrow = ROOMY | {"kv_cache_tokens": CONTEXT, "max_num_batched_tokens": 64}
    chats = mixed[168:180]
    with (
        closing(InProcess(known.folder, **narrow)) as alone,
        closing(InProcess(known.folder, role="ec_producer", store=store)) as encoder,
        closing(InProcess(known.folder, role="ec_consumer", store=store, **narrow)) as pd,
    ):
        known.assert_same(chats, alone.ask(chats, **ASKED))
        assert alone.preemptions > 0
        known.assert_same(chats, pd.ask(through(encoder, chats), **ASKED))
        known.assert_same(chats[-1:], pd.ask(through(encoder, chats[-1:]), **ASKED))
        assert pd.engine.stats.cached_prompt_tokens > 0
        assert pd.engine.runner.encoder.items_encoded == 0


def test_a_head_that_is_the_token_embedding(mixed: list[Messages], tmp_path: Path) -> None:
    """As in Qwen2.5-VL-3B: the checkpoint has no tensor for it."""
    make(tmp_path, "qwen2_5_vl", "tiny", seed=5, is_tied=True)
    known = Known(tmp_path)
    with closing(InProcess(tmp_path, **ROOMY)) as engine:
        assert "lm_head.weight" not in engine.engine.family.checkpoint.tensor_files
        known.assert_same(mixed[:24], engine.ask(mixed[:24], **ASKED))


def _logprobs(answer: Answered, vocab: int) -> torch.Tensor:
    """`[tokens, vocab]`."""
    rows = torch.full((len(answer.ids), vocab), float("nan"))
    for row, said in zip(rows, answer.logprobs, strict=True):
        for token, value in said.top:
            row[token] = value
    return rows
