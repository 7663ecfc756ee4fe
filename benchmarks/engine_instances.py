"""Our servers and vLLM's as process groups that can be stopped in their tracks while another is measured."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from make_model import HEAD, SIZES

from tests.support.vllm import process_environment

NAME = "m"
BIN = Path(sys.executable).parent
CONTEXT = 4096
KV_TOKENS = 8192
SEQUENCES = 16
START_SECONDS = 600.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Peers:
    """What all instances of a run have in common; `vllm` is the Python of its environment, if it is there."""

    folder: Path
    memory: Path
    """On a tmpfs: what encoders hand over."""
    threads: int
    vllm: Path | None

    def model(self, size: str) -> Path:
        return self.folder / size


@dataclass
class Instance:
    """One server, which may be several processes. `seconds` are those from its start to ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ready_path: str
    log: Path
    url: str = ""
    seconds: float = float("nan")
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def start(self) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        began = time.perf_counter()
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*self.command, "--port", str(port)],
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,
            )
        while not self._is_ready():
            if self._process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                sys.exit(f"{self.name} did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(POLL_SECONDS)
        self.seconds = time.perf_counter() - began

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        self._signal(signal.SIGKILL)  # whatever it has left behind
        self._process.wait()
        self._process = None

    def resident(self) -> float:
        """MB: what its processes have for themselves, and once what the largest shares with others."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        found = [p.memory_full_info() for p in [root, *root.children(recursive=True)]]
        return (sum(m.uss for m in found) + max(m.rss - m.uss for m in found)) / 1e6

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _is_ready(self) -> bool:
        try:
            return httpx.get(self.url + self.ready_path, timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def started(instances: Sequence[Instance], times: int = 1) -> Iterator[None]:
    """Each is started alone, the others stopped in their tracks, and remembers the best of some starts."""
    with ExitStack() as stack:
        for instance in instances:
            print(f"  starting {instance.name} ...", flush=True)
            best = float("inf")
            stack.callback(instance.stop)
            for _ in range(times):
                instance.stop()
                instance.start()
                best = min(best, instance.seconds)
            instance.seconds = best
            instance.pause()
        yield


@contextmanager
def alone(*instances: Instance) -> Iterator[None]:
    """Only these run, of all that are started."""
    for instance in instances:
        instance.resume()
    try:
        yield
    finally:
        for instance in instances:
            instance.pause()


def ours(
    peers: Peers, size: str, role: str | None = None, threads: int | None = None, extra: Sequence[str] = ()
) -> Instance:
    name = f"{size}-{role or 'aggregated'}-{len(extra)}"
    command = [str(BIN / "epd-engine"), "serve", str(peers.model(size)), "--served-model-name", NAME]
    command += ["--max-model-len", str(CONTEXT), "--kv-cache-tokens", str(KV_TOKENS)]
    command += ["--max-num-seqs", str(SEQUENCES), "--log-level", "warning", *extra]
    if role is not None:
        shared = {"path": str(_made(peers.memory / "ours")), "capacity": 256 << 20}
        command += _transfer("ECSharedMemoryConnector", role, shared)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads or peers.threads), "HF_HUB_OFFLINE": "1"}
    return Instance(f"ours {name}", command, environment, "/ready", peers.folder / f"{name}.log")


def vllm(peers: Peers, size: str, role: str | None = None) -> Instance:
    assert peers.vllm is not None
    name = f"vllm-{size}-{role or 'aggregated'}"
    command = [str(peers.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(peers.model(size))]
    command += ["--served-model-name", NAME, "--enforce-eager", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes", str(_kv_bytes(size))]
    # Or it would first run the largest picture and video there is: minutes on one core.
    largest = {"image": {"count": 1, "width": 448, "height": 448}, "video": 0}
    command += ["--skip-mm-profiling", "--limit-mm-per-prompt", json.dumps(largest)]
    if role is not None:
        shared = {"shared_storage_path": str(_made(peers.memory / f"vllm-{size}"))}
        command += _transfer("ECExampleConnector", role, shared)
    environment = process_environment() | {"OMP_NUM_THREADS": str(peers.threads)}
    return Instance(f"vLLM {name}", command, environment, "/health", peers.folder / f"{name}.log")


def _kv_bytes(size: str) -> int:
    """Of the same number of tokens as ours, in bfloat16."""
    shape = SIZES[size]
    return KV_TOKENS * shape.layers * 2 * shape.kv_heads * HEAD * 2


def _transfer(connector: str, role: str, extra: Mapping[str, Any]) -> list[str]:
    config = {"ec_connector": connector, "ec_role": role, "ec_connector_extra_config": extra}
    return ["--ec-transfer-config", json.dumps(config)]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
