"""Engine and proxy processes on the shipped model."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.digits import MODEL
from tests.support.preloaded import PreloadedEngine
from tests.support.processes import BIN, Server, free_port

MODEL_NAME = "digits-vl"


def engine(
    name: str,
    folder: Path,
    *,
    role: str | None = None,
    store: Path | None = None,
    memory: Path | None = None,
    capacity: int = 8 << 20,
    model: Path = MODEL,
    extra: Sequence[str] = (),
    is_whole_start: bool = False,
) -> Server:
    """An `epd-engine` in `role` (None: aggregated) on `store`, `memory` (a tmpfs of which it takes `capacity`
    bytes) or both, not started. `is_whole_start`: by its command, imports and all."""
    port = free_port()
    argv = [
        str(BIN / "epd-engine"),
        "serve",
        str(model),
        "--port",
        str(port),
        "--served-model-name",
        MODEL_NAME,
    ]
    if role is not None:
        argv += ["--ec-transfer-config", json.dumps({"ec_role": role, **_connector(store, memory, capacity)})]
    kind = Server if is_whole_start else PreloadedEngine
    return kind(name, [*argv, *extra], port, folder / f"{name}.log")


def _connector(store: Path | None, memory: Path | None, capacity: int) -> dict[str, object]:
    files = {"shared_storage_path": str(store)}
    arenas = {"path": str(memory), "capacity": capacity}
    if memory is None:
        return {"ec_connector": "ECSharedStorageConnector", "ec_connector_extra_config": files}
    if store is None:
        return {"ec_connector": "ECSharedMemoryConnector", "ec_connector_extra_config": arenas}
    tiers = {"memory": arenas, "storage": files}
    return {"ec_connector": "ECTieredConnector", "ec_connector_extra_config": tiers}


def proxy(
    folder: Path, encoders: Sequence[Server], pds: Sequence[Server], extra: Sequence[str] = ()
) -> Server:
    port = free_port()
    argv = [str(BIN / "epd-proxy"), "--port", str(port)]
    for encoder in encoders:
        argv += ["--encoder", encoder.url]
    for pd in pds:
        argv += ["--pd", pd.url]
    return Server("proxy", [*argv, *extra], port, folder / "proxy.log")
