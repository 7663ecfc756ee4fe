from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.digits import Reference
from tests.support.engines import engine, proxy
from tests.support.processes import Server, running


@dataclass
class Deployment:
    """Two encoders and two PDs on one store behind a proxy."""

    encoders: list[Server]
    pds: list[Server]
    proxy: Server
    store: Path

    def entry(self, key: str) -> Path:
        (path,) = self.store.glob(f"*/{key}/encoder_cache.safetensors")
        return path

    def newest_entry(self) -> Path:
        return max(self.store.glob("*/*/encoder_cache.safetensors"), key=lambda p: p.stat().st_mtime_ns)


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("e2e")
    store = folder / "store"
    store.mkdir()
    encoders = [engine(f"encoder-{i}", folder, role="ec_producer", store=store) for i in range(2)]
    # Room for one picture of the largest size: a second one evicts it, and the store is asked again.
    small = ["--encoder-cache-size", "16"]
    pds = [engine(f"pd-{i}", folder, role="ec_consumer", store=store, extra=small) for i in range(2)]
    front = proxy(folder, encoders, pds)
    with running(*encoders, *pds, front):
        yield Deployment(encoders, pds, front, store)


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference()
