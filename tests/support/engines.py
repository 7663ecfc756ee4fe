"""Engine and proxy processes on the shipped model."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.digits import MODEL
from tests.support.processes import BIN, Server, free_port

MODEL_NAME = "digits-vl"


def engine(
    name: str,
    folder: Path,
    *,
    role: str | None = None,
    store: Path | None = None,
    model: Path = MODEL,
    extra: Sequence[str] = (),
) -> Server:
    """An `epd-engine` in `role` (None: aggregated) on `store`, not started yet."""
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
        config = {
            "ec_connector": "ECSharedStorageConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(store)},
        }
        argv += ["--ec-transfer-config", json.dumps(config)]
    return Server(name, [*argv, *extra], port, folder / f"{name}.log")


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
