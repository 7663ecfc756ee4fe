"""Plain transformers as a peer: `generate`, one request after another, in a process of its own."""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEVER = 1 << 30  # an end that no model has


class Loop:
    """Lives in the worker process."""

    def __init__(self, model: Path, threads: int):
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        torch.set_num_threads(threads)
        dtype = getattr(torch, json.loads((model / "config.json").read_text())["dtype"])
        self._torch = torch
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._processor = AutoImageProcessor.from_pretrained(model, backend="pil")

    def tokens_per_second(self, count: int, side: int | None, tokens: int, seed: int) -> float:
        """Of `count` requests, with a picture of `side` each or with text alone."""
        from engine_load import QUESTION, Chats

        chats = Chats(seed)
        pictures = [None if side is None else chats.image(side) for _ in range(count)]
        texts = [QUESTION if side else f"{chats.words()}. How many things can be seen?" for _ in range(count)]
        began = time.perf_counter()
        for picture, text in zip(pictures, texts, strict=True):
            self._generate(picture, text, tokens)
        return count * tokens / (time.perf_counter() - began)

    def _generate(self, picture: Any, text: str, tokens: int) -> None:
        parts = [{"type": "text", "text": text}]
        if picture is not None:
            parts.insert(0, {"type": "image"})
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        ids = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        inputs: dict[str, Any] = {}
        pad = self._model.config.image_token_id
        if picture is not None:
            inputs = dict(self._processor(images=[picture], return_tensors="pt"))
            size = int(inputs["image_grid_thw"].prod()) // 4
            ids = [t for token in ids for t in ([pad] * size if token == pad else [token])]
        prompt = self._torch.tensor([ids])
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=prompt,
                attention_mask=self._torch.ones_like(prompt),
                mm_token_type_ids=(prompt == pad).int(),
                **inputs,
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=NEVER,
            )
        assert out.shape[1] == len(ids) + tokens


_loop: Loop | None = None


class Worker:
    """The near end of a `Loop`, which idles while others are measured."""

    def __init__(self, pool: ProcessPoolExecutor):
        self._pool = pool

    def tokens_per_second(self, count: int, side: int | None, tokens: int, seed: int) -> float:
        return self._pool.submit(_run, count, side, tokens, seed).result()


@contextmanager
def loop(model: Path, threads: int) -> Iterator[Worker]:
    os.environ["OMP_NUM_THREADS"] = str(threads)  # heeded as the worker starts
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(model, threads)) as pool:
        yield Worker(pool)


def _start(model: Path, threads: int) -> None:
    global _loop
    _loop = Loop(model, threads)


def _run(count: int, side: int | None, tokens: int, seed: int) -> float:
    assert _loop is not None
    return _loop.tokens_per_second(count, side, tokens, seed)
