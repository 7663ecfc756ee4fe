"""vLLM as encoder, prefill and decode: our store before prefill, vLLM's own NIXL connector behind it."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.processes import BIN, Server, free_port, running
from tests.support.vllm import VllmServer, our_connector
from tests.vllm.client import Deployment, ask, picture, question, until_metric

FROM_OUTSIDE = "vllm:external_prefix_cache_hits_total"


class Stages(NamedTuple):
    front: Server
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def stages(epd: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    """Stopped as soon as they are not needed: vLLM's decode with NIXL keeps a core busy while it idles."""
    folder = tmp_path_factory.mktemp("stages")
    reads_store = our_connector("ec_consumer", epd.store)
    prefill = VllmServer("prefill", folder, epd.model, reads_store, extra=kv_flags("kv_producer"), nixl=True)
    decode = VllmServer("decode", folder, epd.model, None, extra=kv_flags("kv_consumer"), nixl=True)
    port = free_port()
    argv = [str(BIN / "epd-proxy"), "--port", str(port), "--encoder", epd.encoder.url]
    argv += ["--prefill", prefill.url, "--decode", decode.url]
    with running(prefill, decode):
        front = Server("proxy", argv, port, folder / "proxy.log")
        with running(front):
            yield Stages(front, prefill, decode)


def kv_flags(role: str) -> list[str]:
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return ["--enable-mm-embeds", "--kv-transfer-config", json.dumps(config)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_are_those_of_one_instance(epd: Deployment, stages: Stages, stream: bool) -> None:
    """And decode takes every prompt token over from prefill, which has the picture from the store."""
    before = stages.decode.metric(FROM_OUTSIDE)
    loads = stages.prefill.metric("epd_engine_ec_loads_total")
    asked = [question(picture()), question(picture(), picture(168, 112))]
    for messages in asked:
        answer = ask(stages.front, epd.model, messages, stream=stream)
        assert answer == ask(epd.aggregated, epd.model, messages)
        assert answer.text
    until_metric(stages.prefill, "epd_engine_ec_loads_total", loads + 3)
    # Of which a picture's embeddings are 16 at least.
    assert stages.decode.metric(FROM_OUTSIDE) - before > 3 * 16
