"""What the file connector takes in `ec_connector_extra_config`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_transfer.base import ECConnectorRole, ECModelIdentity
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig
from epd_engine.ec_transfer.shared_storage_connector import ECSharedStorageConnector

IDENTITY = ECModelIdentity("f" * 64, 8, torch.float32)


def connector(path: Path, **extra: Any) -> ECSharedStorageConnector:
    config = ECTransferConfig(
        "ECSharedStorageConnector",
        "ec_both",
        ec_connector_extra_config={"shared_storage_path": str(path), **extra},
    )
    return ECSharedStorageConnector(config, ECConnectorRole.SCHEDULER, IDENTITY)


@pytest.mark.parametrize("verify", ["always", "sample", "never"])
@pytest.mark.parametrize("fsync", [True, False, None])
def test_every_documented_value_is_taken(tmp_path: Path, verify: str, fsync: bool | None) -> None:
    connector(tmp_path, verify=verify, fsync=fsync, touch=False, accept_foreign=True, namespace="ns")


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"verify": "sometimes"}, "'verify' must be one of always, sample, never"),
        ({"verify": True}, "'verify' must be a str"),
        ({"fsync": "yes"}, "'fsync' must be a bool, or null"),
        ({"accept_foreign": "yes"}, "'accept_foreign' must be a bool"),
        ({"namespace": ".janitor"}, "one path component"),
        ({"fsyncs": True}, "does not know ec_connector_extra_config key 'fsyncs'"),
    ],
)
def test_any_other_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], match: str) -> None:
    with pytest.raises(ECConfigError, match=match):
        connector(tmp_path, **extra)


def test_the_bare_layout_of_another_program_is_read_where_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / ("a" * 64)).mkdir()
    save_file({"ec_cache": torch.ones(3, 8)}, tmp_path / ("a" * 64) / "encoder_cache.safetensors")
    store = connector(tmp_path, namespace="", accept_foreign=True).store
    found = store.load("a" * 64, Expectation(IDENTITY.fingerprint, 3, 8, torch.float32), torch.device("cpu"))
    assert torch.equal(found, torch.ones(3, 8))
