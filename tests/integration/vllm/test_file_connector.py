"""vLLM's file connector and our file store read what the other wrote.

vLLM runs without an engine: its connector class, from its own configuration objects, in its own Python.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epd_engine.ec_store.entry import Expectation
from epd_engine.ec_store.errors import EntryDamaged
from epd_engine.ec_store.file_store import FileStore
from tests.cluster.command import Unavailable
from tests.support.vllm import process_environment, vllm_python

PROGRAM = Path(__file__).with_name("connector_program.py")
FINGERPRINT = "f" * 64
KEY, OTHER_KEY = "a" * 64, "b" * 64
SHAPE = (196, 384)
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


class VllmConnector:
    """vLLM's file connector over one directory, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self._process = process

    def ask(self, do: str, store: Path, **rest: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do, "store": str(store), **rest}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "vLLM's process ended; its error is above"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmConnector]:
    try:
        python = vllm_python()
    except Unavailable as reason:
        pytest.skip(str(reason))
    process = subprocess.Popen(
        [python, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=process_environment(),
    )
    with process:
        yield VllmConnector(process)


def values(dtype: torch.dtype) -> torch.Tensor:
    """Ordinary numbers and the ones that a conversion would lose."""
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4)).to(dtype)
    tensor[0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.finfo(dtype).smallest_normal])
    return tensor


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@DTYPES
def test_vllm_reads_what_we_wrote(vllm: VllmConnector, tmp_path: Path, dtype: torch.dtype) -> None:
    base = tmp_path / FINGERPRINT[:16]
    store, tensor = FileStore(tmp_path, base.name), values(dtype)
    store.save(KEY, tensor, fingerprint=FINGERPRINT, modality="image", metadata={"image_grid_thw": [1, 4, 4]})
    assert vllm.ask("has", base, key=KEY) == {"has": True}
    assert vllm.ask("has", base, key=OTHER_KEY) == {"has": False}
    read = tmp_path / "read"
    answer = vllm.ask("load", base, key=KEY, num_embeds=SHAPE[0], raw=str(read))
    assert answer == {"dtype": str(dtype).removeprefix("torch."), "shape": list(SHAPE)}
    assert read.read_bytes() == raw(tensor)


@DTYPES
def test_we_read_what_vllm_wrote(vllm: VllmConnector, tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = values(dtype)
    write(vllm, tmp_path, tensor)
    expected = Expectation(FINGERPRINT, *SHAPE, dtype)
    store = FileStore(tmp_path, "", accept_foreign=True)
    assert store.probe(KEY, expected).foreign
    loaded = store.load(KEY, expected, CPU)
    assert loaded.dtype == dtype
    assert raw(loaded) == raw(tensor)
    with pytest.raises(EntryDamaged, match="width"):
        store.load(KEY, Expectation(FINGERPRINT, SHAPE[0], SHAPE[1] + 1, dtype), CPU)
    with pytest.raises(EntryDamaged, match="accept_foreign"):
        FileStore(tmp_path, "").load(KEY, expected, CPU)


def write(vllm: VllmConnector, store: Path, tensor: torch.Tensor) -> None:
    """Has vLLM save a tensor under `KEY`."""
    path = store / "written"
    path.write_bytes(raw(tensor))
    dtype = str(tensor.dtype).removeprefix("torch.")
    vllm.ask("save", store, key=KEY, raw=str(path), dtype=dtype, shape=list(tensor.shape))
