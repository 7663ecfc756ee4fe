from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.digits import Reference
from tests.support.engines import engine
from tests.support.processes import Server, running


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For engines within the test's own process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="package")
def store(folder: Path) -> Path:
    path = folder / "store"
    path.mkdir()
    return path


@pytest.fixture(scope="package")
def instances(folder: Path, store: Path) -> Iterator[dict[str, Server]]:
    """An encoder, a PD and an aggregated server, for all tests that leave them as they were."""
    limits = ["--max-model-len", "1024", "--limit-mm-per-prompt", '{"image": 4}']
    made = {
        "encoder": engine("encoder", folder, role="ec_producer", store=store, extra=limits[2:]),
        "pd": engine("pd", folder, role="ec_consumer", store=store, extra=limits),
        "aggregated": engine("aggregated", folder, extra=limits),
    }
    with running(*made.values()):
        yield made


@pytest.fixture(scope="package")
def encoder(instances: dict[str, Server]) -> Server:
    return instances["encoder"]


@pytest.fixture(scope="package")
def pd(instances: dict[str, Server]) -> Server:
    return instances["pd"]


@pytest.fixture(scope="package")
def aggregated(instances: dict[str, Server]) -> Server:
    return instances["aggregated"]


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()
