"""vLLM's environment, and instances of it that several tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.command import Unavailable
from tests.support.engines import proxy
from tests.support.processes import Server, running
from tests.support.vllm import VllmServer, our_connector, vllm_python
from tests.vllm.client import Deployment


@pytest.fixture(scope="session")
def python() -> Path:
    """vLLM's Python."""
    try:
        return vllm_python()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL of random weights, which our engine runs too."""
    from benchmarks.make_model import make

    folder = tmp_path_factory.mktemp("models") / "qwen2_5_vl"
    make(folder, "qwen2_5_vl", "tiny")
    return folder


@pytest.fixture(scope="session")
def epd(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """An encoder and a PD of vLLM behind our proxy, and an aggregated one, on one store."""
    folder = tmp_path_factory.mktemp("vllm")
    store = folder / "store"
    # Other users than the encoder's read it, whatever the umask.
    before = os.umask(0o077)
    try:
        encoder = VllmServer("encoder", folder, model, our_connector("ec_producer", store))
        pd = VllmServer("pd", folder, model, our_connector("ec_consumer", store))
        aggregated = VllmServer("aggregated", folder, model, None)
        with running(encoder, pd, aggregated):
            front: Server = proxy(folder, [encoder], [pd])
            with running(front):
                yield Deployment(model, store, encoder, pd, front, aggregated)
    finally:
        os.umask(before)
