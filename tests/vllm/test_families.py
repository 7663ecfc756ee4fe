"""The families that only vLLM runs here: DeepStack's wide entries, and a processor without metadata."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import proxy
from tests.support.processes import running
from tests.support.vllm import VllmServer, our_connector
from tests.support.vlms import DEEPSTACK, make_llava, make_qwen3_vl
from tests.vllm.client import Answer, Deployment, ask, picture, question, until_metric

HIDDEN = 128
TRIES = 20
MAKERS = {"qwen3_vl": make_qwen3_vl, "llava": make_llava}
WIDTH = {"qwen3_vl": HIDDEN * (1 + len(DEEPSTACK)), "llava": HIDDEN}


@pytest.fixture(scope="module", params=MAKERS)
def pair(
    request: pytest.FixtureRequest, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Deployment]]:
    """An encoder and a PD behind our proxy. The PD, asked without the proxy, encodes by itself."""
    family: str = request.param
    folder = tmp_path_factory.mktemp(family)
    model, store = MAKERS[family](folder / "model"), folder / "store"
    video = {} if family == "llava" else {"video": 0}
    encoder = VllmServer("encoder", folder, model, our_connector("ec_producer", store), limits=video)
    pd = VllmServer("pd", folder, model, our_connector("ec_consumer", store), limits=video)
    with running(encoder, pd):
        front = proxy(folder, [encoder], [pd])
        with running(front):
            yield family, Deployment(model, store, encoder, pd, front, pd)


def test_answers_are_those_of_an_instance_that_encodes_by_itself(pair: tuple[str, Deployment]) -> None:
    family, epd = pair
    questions, right = different_answers(epd)
    hits = epd.pd.metric("epd_engine_ec_external_hits_total")
    assert [ask(epd.front, epd.model, one) for one in questions] == right
    # LLaVA's pictures travel again, under the key that the encoder stored them by: no tower runs for them.
    until_metric(epd.pd, "epd_engine_ec_external_hits_total", hits + 4)
    assert {entry_width(entry) for entry in epd.entries()} == {WIDTH[family]}


def different_answers(epd: Deployment) -> tuple[list[list[dict[str, Any]]], list[Answer]]:
    """A question of each shape and its answer, no two alike: random weights say the same of many pictures."""
    questions, right = [], []
    for make in (
        lambda: question(picture()),
        lambda: question(picture(224, 112)),
        lambda: question(picture(), picture()),
    ):
        for _ in range(TRIES):
            asked = make()
            answer = ask(epd.pd, epd.model, asked)
            if answer.text not in {one.text for one in right}:
                break
        questions.append(asked)
        right.append(answer)
    assert len({answer.text for answer in right}) == len(right), "the answer must depend on the pictures"
    return questions, right


def entry_width(path: Path) -> int:
    from epd_engine.ec_store.entry import decode_header

    data = path.read_bytes()
    return decode_header(memoryview(data), len(data))[0].shape[1]
