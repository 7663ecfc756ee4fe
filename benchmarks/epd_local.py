"""Time to the first token and request rate on the shipped model, on this machine.

    python benchmarks/epd_local.py [--quick] [--json FILE]

Measures, in one run: plain transformers in a loop, our aggregated server, and 1 encoder + 1 PD behind the
proxy. Every picture is new, so that no cache helps. Each process has one thread.
"""

import argparse
import asyncio
import base64
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from report import Row, print_table, write_json

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "models" / "digits-vl"
BIN = Path(sys.executable).parent
NAME = "digits-vl"
QUESTION = "What digit is this?"
SIDE = 112
MAX_TOKENS = 8
CONCURRENCY = 8
TRANSFORMERS = "transformers loop"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    count = 40 if arguments.quick else 200
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows = run(count)
    print_table(rows)
    if arguments.json:
        write_json(rows, arguments.json)


def run(count: int) -> list[Row]:
    pictures = Pictures()
    print(f"{count} requests each; transformers ...", flush=True)
    peer_first, peer_rate = transformers_loop(pictures, count)
    rows = [
        Row(f"{TRANSFORMERS}: time to first token", peer_first, "ms"),
        Row(f"{TRANSFORMERS}: rate", peer_rate, "requests/s"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, url in deployments(Path(folder)):
            print(f"{name} ...", flush=True)
            asyncio.run(load(url, pictures, 16, CONCURRENCY))  # warm
            first = statistics.median(asyncio.run(load(url, pictures, count, 1))[0])
            rate = asyncio.run(load(url, pictures, count, CONCURRENCY))[1]
            rows.append(
                Row(f"{name}: time to first token, 1 in flight", first, "ms", TRANSFORMERS, peer_first)
            )
            rows.append(
                Row(f"{name}: rate, {CONCURRENCY} in flight", rate, "requests/s", TRANSFORMERS, peer_rate)
            )
    return rows


class Pictures:
    """An endless supply of different pictures."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def image(self) -> Image.Image:
        return Image.fromarray(self._random.integers(0, 256, (SIDE, SIDE, 3), "uint8"))

    def body(self, **fields: Any) -> dict[str, Any]:
        buffer = io.BytesIO()
        self.image().save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": QUESTION},
        ]
        message = {"role": "user", "content": content}
        return {"model": NAME, "messages": [message], "max_tokens": MAX_TOKENS, "temperature": 0, **fields}


def transformers_loop(pictures: Pictures, count: int) -> tuple[float, float]:
    """Median time to the first token in ms, and requests/s, of one request after another."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    processor = AutoImageProcessor.from_pretrained(MODEL, backend="pil")
    pad = model.config.image_token_id
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def generate(max_tokens: int) -> None:
        inputs = dict(processor(images=[pictures.image()], return_tensors="pt"))
        size = int(inputs["image_grid_thw"].prod()) // 4
        ids = torch.tensor([[t for token in prompt for t in ([pad] * size if token == pad else [token])]])
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == pad).int(),
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
        )

    for _ in range(5):
        generate(MAX_TOKENS)
    firsts = []
    for _ in range(count):
        began = time.perf_counter()
        generate(1)
        firsts.append((time.perf_counter() - began) * 1000)
    began = time.perf_counter()
    for _ in range(count):
        generate(MAX_TOKENS)
    return statistics.median(firsts), count / (time.perf_counter() - began)


async def load(url: str, pictures: Pictures, count: int, concurrency: int) -> tuple[list[float], float]:
    """Times to the first token in ms, and requests/s; bodies are made before the clock starts."""
    bodies = [pictures.body(stream=True) for _ in range(count)]
    firsts: list[float] = []
    gate = asyncio.Semaphore(concurrency)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with gate:
            began = time.perf_counter()
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                first = True
                async for _ in response.aiter_raw():
                    if first:
                        firsts.append((time.perf_counter() - began) * 1000)
                    first = False

    async with httpx.AsyncClient(timeout=120) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, body) for body in bodies))
        return firsts, count / (time.perf_counter() - began)


def deployments(folder: Path) -> Iterator[tuple[str, str]]:
    """Each form of serving with its address, alone on the machine while it is measured."""
    with started(engine_command(), "aggregated", folder) as url:
        yield "aggregated", url
    store = folder / "store"
    store.mkdir()
    with (
        started(engine_command("ec_producer", store), "encoder", folder) as encoder,
        started(engine_command("ec_consumer", store), "pd", folder) as pd,
        started([str(BIN / "epd-proxy"), "--encoder", encoder, "--pd", pd], "proxy", folder) as url,
    ):
        yield "1E+1PD", url


def engine_command(role: str | None = None, store: Path | None = None) -> list[str]:
    command = [str(BIN / "epd-engine"), "serve", str(MODEL), "--served-model-name", NAME]
    if role is None:
        return command
    extra = {"shared_storage_path": str(store)}
    config = {"ec_connector": "ECSharedStorageConnector", "ec_role": role, "ec_connector_extra_config": extra}
    return [*command, "--ec-transfer-config", json.dumps(config)]


@contextmanager
def started(command: Sequence[str], name: str, folder: Path) -> Iterator[str]:
    """The address of a process that is ready, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)
    try:
        while not is_ready(url):
            if process.poll() is not None:
                sys.exit(f"{name} ended:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main()
