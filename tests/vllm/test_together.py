"""Our engine and vLLM on one store: whichever of them encodes, the other one's PD reads it."""

from collections.abc import Iterator

import pytest

from tests.support.engines import MODEL_NAME, engine
from tests.support.processes import Server, running
from tests.vllm.client import Deployment, about, ask, picture, prime, question, until_metric


@pytest.fixture(scope="module")
def ours(epd: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Our encoder and a PD of ours, which has the tower, on vLLM's store."""
    folder = tmp_path_factory.mktemp("ours")
    servers = {
        "encoder": engine("encoder", folder, role="ec_producer", store=epd.store, model=epd.model),
        "pd": engine(
            "pd", folder, role="ec_consumer", store=epd.store, model=epd.model, extra=["--ec-miss", "compute"]
        ),
    }
    with running(*servers.values()):
        yield servers


def test_our_pd_reads_what_vllms_encoder_wrote(epd: Deployment, ours: dict[str, Server]) -> None:
    url = picture()
    parts = prime(epd.encoder, epd.model, url)
    answer = ask(ours["pd"], MODEL_NAME, about(*parts))
    assert ours["pd"].metric("epd_engine_ec_loads_total") == 1
    assert answer == ask(ours["pd"], MODEL_NAME, question(url))
    assert answer.text


def test_vllms_pd_reads_what_our_encoder_wrote(epd: Deployment, ours: dict[str, Server]) -> None:
    url = picture()
    before = epd.pd.metric("epd_engine_ec_external_hits_total")
    answer = ask(epd.pd, epd.model, about(*prime(ours["encoder"], MODEL_NAME, url)))
    until_metric(epd.pd, "epd_engine_ec_external_hits_total", before + 1)
    assert answer == ask(epd.aggregated, epd.model, question(url))
    assert answer.text


def test_both_encoders_agree_on_whose_entries_these_are(epd: Deployment, ours: dict[str, Server]) -> None:
    prime(epd.encoder, epd.model, picture())
    prime(ours["encoder"], MODEL_NAME, picture())
    assert len({entry.parent.parent for entry in epd.entries()}) == 1
