import json
from pathlib import Path

import pytest

from epd_engine.ec_transfer.base import ECConnectorRole
from epd_engine.ec_transfer.config import ECConfigError, ECTransferConfig
from epd_engine.ec_transfer.factory import ECConnectorFactory
from epd_engine.ec_transfer.shared_storage_connector import ECSharedStorageConnector
from tests.support.engine_objects import IDENTITY, SetConnector

GOOD = {"ec_connector": "ECSharedStorageConnector", "ec_role": "ec_producer"}


def make(**changes: object) -> ECTransferConfig:
    return ECTransferConfig.from_json(json.dumps({**GOOD, **changes}))


@pytest.mark.parametrize(
    ("role", "produces", "consumes", "encode_only"),
    [
        ("ec_producer", True, False, True),
        ("ec_consumer", False, True, False),
        ("ec_both", True, True, False),
    ],
)
def test_roles(role: str, produces: bool, consumes: bool, encode_only: bool) -> None:
    config = make(ec_role=role)
    assert (config.is_producer, config.is_consumer, config.is_encode_only) == (
        produces,
        consumes,
        encode_only,
    )


def test_every_field_of_vllms_config_is_known() -> None:
    config = make(
        engine_id="e",
        ec_buffer_device="cpu",
        ec_buffer_size=1e9,
        ec_rank=0,
        ec_parallel_size=1,
        ec_ip="127.0.0.1",
        ec_port=14579,
        ec_connector_extra_config={},
        ec_connector_module_path=None,
    )
    assert config.ec_port == 14579


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("{}", "'ec_connector' is needed"),
        (json.dumps({**GOOD, "ec_role": "boss"}), "ec_role must be one of"),
        (json.dumps({**GOOD, "ec_conector_extra": 1}), "unknown field 'ec_conector_extra'"),
        (json.dumps({**GOOD, "ec_connector_extra_config": []}), "ec_connector_extra_config must be"),
    ],
)
def test_a_wrong_config_is_refused_by_name(text: str, match: str) -> None:
    with pytest.raises(ECConfigError, match=match):
        ECTransferConfig.from_json(text)


@pytest.mark.parametrize("name", ["ECSharedStorageConnector", "ECExampleConnector"])
def test_the_built_in_connector_has_two_names(name: str) -> None:
    config = make(ec_connector=name)
    assert ECConnectorFactory.get_connector_class(config) is ECSharedStorageConnector


def test_connectors_load_by_module_path() -> None:
    config = make(ec_connector="SetConnector", ec_connector_module_path=SetConnector.__module__)
    assert ECConnectorFactory.get_connector_class(config) is SetConnector


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ec_connector": "Nobody"}, "unknown ec_connector 'Nobody'; known are"),
        ({"ec_connector": "X", "ec_connector_module_path": "no.such.module"}, "not in no.such.module"),
        ({"ec_connector": "X", "ec_connector_module_path": "json"}, "not in json"),
        ({"ec_connector": "JSONDecoder", "ec_connector_module_path": "json"}, "no ECConnectorBase"),
    ],
)
def test_a_connector_that_cannot_be_had_is_named(changes: dict, match: str) -> None:
    with pytest.raises(ECConfigError, match=match):
        ECConnectorFactory.get_connector_class(make(**changes))


def test_a_store_that_cannot_be_there_is_found_out_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make(ec_connector_extra_config={"shared_storage_path": str(tmp_path / "file" / "store")})
    with pytest.raises(ECConfigError, match="store cannot be used: Not a directory"):
        ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER, IDENTITY)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"shared_storage_pth": "/x"}, "does not know ec_connector_extra_config key 'shared_storage_pth'"),
        ({"fsync": "yes"}, "'fsync' must be a bool"),
        ({"verify": "perhaps"}, "'verify' must be"),
        ({"namespace": "../x"}, "one path component"),
    ],
)
def test_a_wrong_extra_config_is_refused_by_name(extra: dict, match: str) -> None:
    config = make(ec_connector_extra_config=extra)
    with pytest.raises(ECConfigError, match=match):
        ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER, IDENTITY)
