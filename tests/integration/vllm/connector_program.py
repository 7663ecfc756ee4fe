"""vLLM's own file connector, driven without an engine; run by vLLM's Python, never imported by ours.

Takes one JSON document a line and answers with one: `save`, `load` and `has` are what an encoder's worker, a
consumer's worker and a consumer's scheduler do. Tensors travel as raw bytes in a file beside the store.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnectorMetadata, MMMeta
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory


def connector(store: str, ec_role: str, role: ECConnectorRole) -> ECConnectorBase:
    transfer = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role=ec_role,
        ec_connector_extra_config={"shared_storage_path": store},
    )
    return ECConnectorFactory.create_connector(VllmConfig(ec_transfer_config=transfer), role)


def save(command: dict[str, Any]) -> dict[str, Any]:
    raw = bytearray(Path(command["raw"]).read_bytes())
    tensor = torch.frombuffer(raw, dtype=getattr(torch, command["dtype"])).view(command["shape"])
    worker = connector(command["store"], "ec_both", ECConnectorRole.WORKER)  # a producer alone needs a model
    worker.save_caches({command["key"]: tensor}, command["key"])
    return {}


def load(command: dict[str, Any]) -> dict[str, Any]:
    worker = connector(command["store"], "ec_consumer", ECConnectorRole.WORKER)
    metadata = ECExampleConnectorMetadata()
    metadata.add_mm_data(MMMeta.make_meta(command["key"], command["num_embeds"]))
    worker.bind_connector_metadata(metadata)
    encoder_cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(encoder_cache)
    worker.clear_connector_metadata()
    tensor = encoder_cache[command["key"]]
    Path(command["raw"]).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def has(command: dict[str, Any]) -> dict[str, Any]:
    scheduler = connector(command["store"], "ec_consumer", ECConnectorRole.SCHEDULER)
    return {"has": scheduler.has_cache_item(command["key"])}


def main() -> None:
    commands = {"save": save, "load": load, "has": has}
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command["do"]](command)), flush=True)


if __name__ == "__main__":
    main()
