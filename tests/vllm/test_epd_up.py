"""`epd up` with `engine.type: vllm`: the flags that we give are vLLM's, and a picture is answered."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from epd_operator.api import EPDDeployment
from epd_operator.local.machine import Machine
from epd_operator.local.plan import make_plan, port_count
from epd_operator.local.vllm import VllmInstallation
from epd_operator.wire import StorePlaces
from tests.integration.local.epd_runner import Epd, with_clean_end
from tests.support.processes import BIN
from tests.support.vllm import ENGINE, FLAGS, LARGEST, NO_VIDEO, process_environment
from tests.vllm.client import picture, question

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
for line in json.loads(sys.argv[1]):
    parsed = parser.parse_args(line)
    validate_parsed_serve_args(parsed)
    print(json.dumps([parsed.shutdown_timeout, parsed.enable_mm_embeds, parsed.enable_request_id_headers]))
"""


def document(model: Path, roles: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": "vllm"},
        "spec": {"model": {"source": str(model)}, "engine": {"type": "vllm"}, "roles": roles},
    }


def test_vllm_knows_every_flag_of_every_role(python: Path, model: Path) -> None:
    wanted = EPDDeployment.model_validate(document(model, {"encoder": {}, "prefill": {}, "decode": {}}))
    machine = Machine(
        engine="epd-engine",
        proxy="epd-proxy",
        cores=2,
        environment={},
        model=str(model),
        places=StorePlaces("/store", None, None),
        host="127.0.0.1",
        proxy_port=8000,
        ports=range(9000, 9000 + port_count(wanted)),
        vllm=VllmInstallation(str(python), "/connector"),
    )
    lines = [process.argv[4:] for process in make_plan(wanted, "vllm", machine).processes[:-2]]
    ran = subprocess.run(
        [python, "-c", PARSE, json.dumps(lines)],
        env={**process_environment(), "PYTHONPATH": str(ENGINE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [
        [30, False, True],
        [30, True, True],
        [30, True, True],
    ]


def finishes_after_sigterm(url: str, pid: int, name: str) -> bool:
    """Whether a stream that has begun when its instance gets SIGTERM is whole."""
    messages = [{"role": "user", "content": "Count."}]
    body = {"model": name, "messages": messages, "max_tokens": 200, "ignore_eos": True, "stream": True}
    received = b""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        for piece in answer.iter_raw():
            if not received:
                os.kill(pid, signal.SIGTERM)
            received += piece
    return received.endswith(b"data: [DONE]\n\n") and received.count(b'"finish_reason":"length"') == 1


@pytest.fixture
def epd(tmp_path: Path) -> Iterator[Epd]:
    home = tmp_path / "state"
    home.mkdir()
    yield from with_clean_end(Epd(BIN / "python", home))


def test_a_picture_is_answered_and_nothing_is_left(
    epd: Epd, python: Path, model: Path, tmp_path: Path
) -> None:
    env = [{"name": name, "value": value} for name, value in process_environment().items() if "VLLM" in name]
    limits = json.dumps({"image": LARGEST, **NO_VIDEO})
    role = {"extraArgs": [*FLAGS, "--dtype", "float32", "--limit-mm-per-prompt", limits], "env": env}
    file = tmp_path / "vllm.yaml"
    file.write_text(yaml.safe_dump(document(model, {"encoder": role, "pd": role})))
    up = epd.start("up", "-f", file, "--port", "0", "--vllm-python", python)
    state = epd.until_ready()
    body = {"model": model.name, "messages": question(picture()), "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{state['address']}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    # The picture went through our store.
    assert len(list(Path(state["store"]).glob("*/*/encoder_cache.safetensors"))) == 1
    # One that is told to end finishes what it has begun.
    (pd,) = (one for one in state["processes"] if one["role"] == "pd")
    assert finishes_after_sigterm(f"http://127.0.0.1:{pd['port']}", pd["pid"], model.name)
    up.terminate()
    assert up.wait(120) == 0
    epd.assert_nothing_left()
