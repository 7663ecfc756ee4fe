"""A worker of `ec_store.py` that runs vLLM's file connector, without an engine, by vLLM's own Python."""

# mypy: disable-error-code="import-not-found"

import shutil
from itertools import count
from pathlib import Path

import torch
from ec_store_workers import median_seconds, serve
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnectorMetadata, MMMeta
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory


def connector(role: str, path: str | Path) -> ECConnectorBase:
    """Both roles at most: a producer alone needs a model's configuration."""
    transfer = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role=role,
        ec_connector_extra_config={"shared_storage_path": str(path)},
    )
    return ECConnectorFactory.create_connector(
        VllmConfig(ec_transfer_config=transfer), ECConnectorRole.WORKER
    )


class Worker:
    """One tensor size at a time."""

    def start_loads(self, rows: int, width: int, keys: list[str], memory: str, files: str) -> None:
        self._keys = keys
        self._target = torch.zeros(rows, width, dtype=torch.bfloat16)
        self._connector = connector("ec_consumer", f"{files}/files")

    def start_saves(self, rows: int, width: int, keys: list[str], memory: str, files: str) -> None:
        self._keys = keys
        self._directory = Path(files, "saves", "vllm")
        self._sources = [torch.randn(rows, width).bfloat16() for _ in keys]
        self._connector = connector("ec_both", self._directory)
        self._saved = count()
        self.clean()

    def run(self, operation: str, repeat: int) -> float:
        function = self._load if operation == "vllm load" else self._save
        return median_seconds(function, len(self._keys), repeat)

    def clean(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    def end(self) -> None:
        vars(self).clear()

    def _load(self, index: int) -> None:
        """To the last byte: what `start_load_caches` answers with is only mapped."""
        key = self._keys[index]
        step = ECExampleConnectorMetadata()
        step.add_mm_data(MMMeta.make_meta(key, len(self._target)))
        self._connector.bind_connector_metadata(step)
        encoder_cache: dict[str, torch.Tensor] = {}
        self._connector.start_load_caches(encoder_cache)
        self._target.copy_(encoder_cache[key])
        self._connector.clear_connector_metadata()

    def _save(self, index: int) -> None:
        key = f"{next(self._saved):064x}"
        self._connector.save_caches({key: self._sources[index]}, key)


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker = Worker()
    names = ("start_loads", "start_saves", "run", "clean", "end")
    serve({name: getattr(worker, name) for name in names})
