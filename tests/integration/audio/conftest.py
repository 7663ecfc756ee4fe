from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.engines import engine, proxy
from tests.support.processes import Server, running


@dataclass
class AudioDeployment:
    """One encoder and one PD on one store behind a proxy, and an aggregated server beside them."""

    encoder: Server
    pd: Server
    proxy: Server
    aggregated: Server
    store: Path


@pytest.fixture(scope="package")
def audio(tmp_path_factory: pytest.TempPathFactory, audio_model: Path) -> Iterator[AudioDeployment]:
    folder = tmp_path_factory.mktemp("audio")
    store = folder / "store"
    store.mkdir()
    encoder = engine("encoder", folder, role="ec_producer", store=store, model=audio_model)
    pd = engine("pd", folder, role="ec_consumer", store=store, model=audio_model)
    aggregated = engine("aggregated", folder, model=audio_model, extra=["--max-audio-seconds", "60"])
    front = proxy(folder, [encoder], [pd])
    with running(encoder, pd, aggregated, front):
        yield AudioDeployment(encoder, pd, front, aggregated, store)
