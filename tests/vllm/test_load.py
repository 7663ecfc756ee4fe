"""Two encoders of vLLM, a PD and the janitor on one store that is far too small, under load."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.engines import proxy
from tests.support.processes import BIN, Server, free_port, running
from tests.support.vllm import VllmServer, our_connector
from tests.support.waiting import eventually
from tests.vllm.client import Deployment, ask, picture, question

ENTRY_BYTES = 16 * 128 * 4
BUDGET = 32 * ENTRY_BYTES
PICTURES, CLIENTS = 48, 6


@pytest.fixture(scope="module")
def crowded(epd: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A proxy before both encoders; the janitor keeps some thirty entries."""
    folder = tmp_path_factory.mktemp("crowded")
    second = VllmServer("second", folder, epd.model, our_connector("ec_producer", epd.store))
    port = free_port()
    limits = ["--capacity", str(BUDGET), "--interval", "0.2", "--grace", "0.5"]
    argv = [
        str(BIN / "epd-engine"),
        "store",
        "janitor",
        "--path",
        str(epd.store),
        "--port",
        str(port),
        *limits,
    ]
    with running(second, Server("janitor", argv, port, folder / "janitor.log")):
        front = proxy(folder, [epd.encoder, second], [epd.pd])
        with running(front):
            yield front
    # Writers keep to the budget that a janitor told last; other tests of this store have none.
    (epd.store / ".janitor" / "report").unlink()


def test_every_answer_is_right_and_the_store_stays_within_its_budget(
    epd: Deployment, crowded: Server
) -> None:
    questions = [question(picture()) for _ in range(PICTURES)]
    right = [ask(epd.aggregated, epd.model, one) for one in questions]
    # Each twice, the second time when the store has long lost it.
    asked = list(itertools.chain(questions, questions))
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda one: ask(crowded, epd.model, one), asked))
    assert answers == right + right
    assert httpx.get(f"{epd.pd.url}/health", timeout=10).status_code == 200
    eventually(lambda: stored_bytes(epd.store) <= BUDGET)


def stored_bytes(store: Path) -> int:
    found = 0
    for path in store.glob("*/*/encoder_cache.safetensors"):
        try:
            found += path.stat().st_size
        except OSError:
            continue  # the janitor was faster
    return found
