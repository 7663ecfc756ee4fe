"""Sounds made by code, a tiny audio model of random weights, and that model as plain transformers runs it."""

import base64
import io
import wave
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.digits import Generated

RATE = 16_000
SECONDS = 8  # the most that the tiny model takes


def tone(seconds: float, seed: int = 0, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """A chord under a slow beat, with some noise: `[n, channels]` float32 within [-1, 1]."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate))[:, None] / rate
    pitch = rng.uniform(100, 3000, (3, 1, channels))
    chord = np.sin(2 * np.pi * pitch * t).sum(0) * (1 + np.sin(2 * np.pi * rng.uniform(0.5, 6) * t)) / 8
    return (chord + rng.normal(0, 0.03, chord.shape)).clip(-1, 1).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """A 16 bit PCM file, by the standard library."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def sound(seconds: float, seed: int = 0) -> bytes:
    return wav(tone(seconds, seed))


def input_audio(data: bytes, kind: str = "wav") -> dict[str, Any]:
    payload = {"data": base64.b64encode(data).decode(), "format": kind}
    return {"type": "input_audio", "input_audio": payload}


def audio_url(data: bytes) -> dict[str, Any]:
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}}


def hear(*parts: str | bytes | dict[str, Any]) -> dict[str, Any]:
    """A user message; bytes become `input_audio` parts."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content.append(input_audio(part) if isinstance(part, bytes) else part)
    return {"role": "user", "content": content}


def make_audio_model(folder: Path) -> Path:
    from benchmarks.make_model import make

    make(folder, "qwen2_audio", "tiny", seed=1)
    return folder


class AudioReference:
    """Greedy generation by plain transformers, with its own loader and processor, on the same messages."""

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def model(self) -> Any:
        from transformers import Qwen2AudioForConditionalGeneration

        return Qwen2AudioForConditionalGeneration.from_pretrained(self._folder, dtype=torch.float32).eval()

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self._folder)

    def inputs(self, messages: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        from transformers.audio_utils import load_audio

        sounds, plain = [], []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                sounds += [load_audio(_source(p), RATE) for p in content if p["type"] != "text"]
                content = [p if p["type"] == "text" else {"type": "audio"} for p in content]
            plain.append({**message, "content": content})
        text = self.processor.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        options = {"audio": sounds, "sampling_rate": RATE} if sounds else {}
        return dict(self.processor(text=text, return_tensors="pt", **options))

    @torch.inference_mode()
    def generate(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> Generated:
        inputs = self.inputs(messages)
        out = self.model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits)[:, 0].topk(2).values
        ids = inputs["input_ids"][0].tolist()
        return Generated(ids, out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def _source(part: dict[str, Any]) -> str:
    payload: str = part["input_audio"]["data"] if part["type"] == "input_audio" else part["audio_url"]["url"]
    return payload
