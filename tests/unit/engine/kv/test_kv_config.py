"""What `--kv-transfer-config` and `kv_transfer_params` take, and how they refuse."""

import json
from typing import Any

import pytest
import torch

from epd_engine.core.remote_kv import RemoteDecode, RemotePrefill
from epd_engine.core.request import RequestError
from epd_engine.core.sampling import TokenLogprobs
from epd_engine.kv_transfer.base import KVConnectorRole, KVModelIdentity
from epd_engine.kv_transfer.config import KVConfigError, KVTransferConfig
from epd_engine.kv_transfer.factory import KVConnectorFactory
from epd_engine.kv_transfer.params import add_logprobs, parse, prefilled

GIVEN = {"kv_connector": "SharedStorageKVConnector", "kv_role": "kv_producer"}
IDENTITY = KVModelIdentity("f" * 64, torch.float32, 16, 3, 2, 32, vocab_size=512)
PRODUCER = KVTransferConfig("SharedStorageKVConnector", "kv_producer")
CONSUMER = KVTransferConfig("SharedStorageKVConnector", "kv_consumer")


def config(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig.from_json(json.dumps({**GIVEN, **fields}))


def test_vllms_fields_are_taken() -> None:
    made = config(engine_id="p", kv_ip="127.0.0.1", kv_port=1, kv_rank=0, kv_load_failure_policy="fail")
    assert (made.engine_id, made.is_producer, made.is_consumer) == ("p", True, False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_roles": "x"}, "unknown field 'kv_roles'"),
        ({"kv_role": "kv_prefill"}, "kv_role must be one of kv_producer, kv_consumer, kv_both"),
        ({"kv_role": None}, "'kv_role' is needed"),
        ({"kv_connector": 3}, "'kv_connector' is needed"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config must be a JSON object"),
        ({"kv_parallel_size": 2}, "kv_parallel_size must be 1"),
        ({"kv_load_failure_policy": "recompute"}, 'kv_load_failure_policy must be "fail"'),
        ({"enable_permute_local_kv": True}, "enable_permute_local_kv must be false"),
        ({"engine_id": 4}, "engine_id must be a string"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KVConfigError, match=said):
        config(**fields)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"path": "/x"}, "key 'path'; known are shared_storage_path, fsync, lease_seconds"),
        ({"lease_seconds": 0}, "'lease_seconds' must be more than 0"),
        ({"lease_seconds": "1"}, "'lease_seconds' must be a float"),
        ({"fsync": 1}, "'fsync' must be a bool"),
        ({"lease_seconds": 10, "orphan_seconds": 5}, "'orphan_seconds' must not be below lease_seconds"),
        ({"shared_storage_path": "/proc/nowhere"}, "/proc/nowhere cannot be used"),
    ],
)
def test_extra_config_is_refused_by_name(extra: dict[str, Any], said: str) -> None:
    made = config(kv_connector_extra_config=extra)
    with pytest.raises(KVConfigError, match=said):
        KVConnectorFactory.create_connector(made, KVConnectorRole.WORKER, IDENTITY)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_connector": "Other"}, "unknown kv_connector 'Other'; known are .*SharedStorageKVConnector"),
        ({"kv_connector_module_path": "no.such.module"}, "is not in no.such.module"),
        (
            {"kv_connector": "KVModelIdentity", "kv_connector_module_path": "epd_engine.kv_transfer.base"},
            "is no KV",
        ),
    ],
)
def test_a_connector_that_is_not_there_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(KVConfigError, match=said):
        KVConnectorFactory.get_connector_class(config(**fields))


def said(**fields: Any) -> dict[str, Any]:
    made = prefilled(
        IDENTITY,
        engine_id="p",
        transfer_id="a" * 64,
        num_prompt_tokens=9,
        first_token_id=5,
        connector={"block_ends": [1]},
    )
    return json.loads(json.dumps({**made, **fields}))  # type: ignore[no-any-return]


def test_what_prefill_says_is_what_decode_reads() -> None:
    params = said()
    add_logprobs(params, TokenLogprobs(-0.5, ((5, -0.5), (6, float("-inf")))))
    kv = parse(json.loads(json.dumps(params, allow_nan=False)), CONSUMER, IDENTITY)
    logprobs = TokenLogprobs(-0.5, ((5, -0.5), (6, -9999.0)))
    assert kv == RemotePrefill("p", "a" * 64, 9, 5, logprobs, {"block_ends": [1]})


@pytest.mark.parametrize("given", [None, {}, {"do_remote_decode": None}, {"do_remote_prefill": False}])
def test_params_that_ask_for_nothing(given: dict[str, Any] | None) -> None:
    assert parse(given, None, None) is None


def test_vllms_way_to_ask_for_a_prefill() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
    assert parse(asked, PRODUCER, IDENTITY) == RemoteDecode()


@pytest.mark.parametrize(
    ("params", "role", "status", "message"),
    [
        ({"do_remote_decode": True}, None, 400, "hands no KV on"),
        ({"do_remote_decode": True}, CONSUMER, 400, "hands no KV on"),
        ({"do_remote_decode": True, "x": 1}, PRODUCER, 400, "'x' does not go with"),
        ({"remote_engine_id": "p"}, CONSUMER, 400, "must be true"),
        (said(), PRODUCER, 400, "takes no KV over"),
        (said(), None, 400, "takes no KV over"),
        (said(remote_request_id="../x"), CONSUMER, 400, "remote_request_id"),
        (said(remote_request_id="A" * 64), CONSUMER, 400, "remote_request_id"),
        (said(first_token_id=512), CONSUMER, 400, "512 tokens"),
        (said(first_token_id=-1), CONSUMER, 400, "first_token_id"),
        (said(num_prompt_tokens=0), CONSUMER, 400, "num_prompt_tokens"),
        (said(first_token_logprobs={"chosen": 0.0}), CONSUMER, 400, "first_token_logprobs"),
        (said(more=1), CONSUMER, 400, "more"),
        (said(connector=None), CONSUMER, 400, "connector"),
        (said(compatibility={**IDENTITY.compatibility, "block_size": 32}), CONSUMER, 409, "block size is 32"),
        (said(compatibility={**IDENTITY.compatibility, "dtype": "bfloat16"}), CONSUMER, 409, "dtype"),
        (said(compatibility={**IDENTITY.compatibility, "layout": "x"}), CONSUMER, 409, "layout is 'x'"),
        (said(compatibility={**IDENTITY.compatibility, "model": "e" * 64}), CONSUMER, 409, "model is"),
        (said(compatibility={}), CONSUMER, 409, "model is None"),
    ],
)
def test_params_that_are_refused(
    params: dict[str, Any], role: KVTransferConfig | None, status: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        parse(params, role, IDENTITY)
    assert refused.value.status == status
    assert refused.value.code == ("kv_incompatible" if status == 409 else "invalid_value")
