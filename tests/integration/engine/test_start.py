"""What an instance says, and with what it ends, where it cannot be started as asked."""

import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.digits import MODEL
from tests.support.engines import engine
from tests.support.processes import Server, free_port

TOP = Path("/sys/fs/cgroup")
LIMIT = 1 << 30


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that limits memory as a pod's does."""
    parent, limit = TOP / "memory", "memory.limit_in_bytes"
    if not (parent / limit).exists():
        parent, limit = TOP, "memory.max"
    made = parent / f"epd-test-{uuid.uuid4().hex[:8]}"
    try:
        made.mkdir()
        (made / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield made
    made.rmdir()


def refusal(server: Server) -> str:
    """The last word of an instance that ended as it should: with 1, and without a stack trace."""
    server.start()
    try:
        assert server.wait() == 1
    finally:
        server.stop()
    last = json.loads(server.log.read_text().splitlines()[-1])
    assert last["level"] == "error"
    assert "traceback" not in last
    return str(last["event"])


def test_kv_that_no_memory_holds_is_refused_with_the_sums(tmp_path: Path) -> None:
    said = refusal(engine("greedy", tmp_path, extra=["--kv-cache-tokens", str(10**12)], is_whole_start=True))
    assert "KV of 1000000000000 tokens" in said
    assert "lower --kv-cache-tokens" in said


def test_a_containers_limit_counts_and_not_the_machines_memory(tmp_path: Path, group: Path) -> None:
    server = engine("contained", tmp_path, extra=["--kv-cache-tokens", "1000000"], is_whole_start=True)
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    server.argv = ["/bin/sh", "-c", enter, "sh", *server.argv]
    free = re.search(r"and ([\d.]+) GiB is free", refusal(server))
    assert free is not None
    assert float(free.group(1)) < LIMIT / (1 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    said = refusal(engine("blind", tmp_path, extra=["--device", "cuda"]))
    assert "no CUDA devices are to be seen here" in said
    assert "--device cpu" in said


Spoil = Callable[[Path], None]


def without(*names: str) -> Spoil:
    def spoil(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return spoil


def quantized(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (model / "config.json").write_text(json.dumps(config))


def eight_bits(model: Path) -> None:
    """As some tools write them, without a word in the config."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("down_proj.weight"))
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
        (without("chat_template.jinja"), "has no chat template"),
        (without("preprocessor_config.json"), "AutoImageProcessor cannot be made of its files"),
        (quantized, "holds quantized weights; only float32, bfloat16 and float16"),
        (eight_bits, "down_proj.weight is torch.float8_e4m3fn; only"),
    ],
)
def test_a_folder_that_lacks_something_ends_the_start_with_its_name(
    tmp_path: Path, spoil: Spoil, said: str
) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    spoil(model)
    assert said in refusal(engine("spoilt", tmp_path, model=model))


LOADS_FOR_EVER = """
import sys, time
from epd_engine.config import EngineConfig
from epd_engine.server import serve
serve.Engine = lambda _: time.sleep(3600)
sys.exit(serve.serve(EngineConfig("m"), "127.0.0.1", int(sys.argv[1]), 3600, "info"))
"""


class Loading(Server):
    ready_path = "/health"


def test_an_end_does_not_wait_for_weights(tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-c", LOADS_FOR_EVER, str(port)]
    server = Loading("loading", argv, port, tmp_path / "log").start().wait_ready()
    try:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.stop()
    assert "ended while loading" in server.log.read_text().splitlines()[-1]


def test_a_port_that_is_taken_does_not_wait_for_weights(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = [sys.executable, "-c", LOADS_FOR_EVER, str(port)]
        server = Loading("loading", argv, port, tmp_path / "log").start()
        try:
            assert server.wait() == 3  # as uvicorn has it
        finally:
            server.stop()
    assert "address already in use" in server.log.read_text()
