"""The shipped model as plain transformers runs it: the reference for tokens."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "digits-vl"
IMAGES = ROOT / "examples" / "images"
TIE = 1e-4  # a differing token passes only where the reference's two best logits are closer than this


def shipped(name: str) -> Image.Image:
    return Image.open(IMAGES / f"{name}.png").convert("RGB")


def data_url(image: Image.Image, fmt: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, fmt)
    return bytes_url(buffer.getvalue(), f"image/{fmt.lower()}")


def bytes_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: str | Image.Image) -> dict[str, Any]:
    """A user message; pictures become data URLs."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


@dataclass
class Generated:
    prompt_ids: list[int]
    ids: list[int]
    # The gap between the two best logits at each generated token.
    margins: list[float]


class Reference:
    """Greedy generation by plain transformers on the same messages."""

    def __init__(self, model: Path = MODEL, dtype: torch.dtype = torch.float32):
        self._path, self._dtype = model, dtype

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(self._path, dtype=self._dtype).eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path, backend="pil")

    @torch.inference_mode()
    def generate(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> Generated:
        ids, inputs = self._inputs(messages)
        out = self.model.generate(
            **self._of_tokens(ids),
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.logits)[:, 0].topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        return Generated(ids, out.sequences[0, len(ids) :].tolist(), margins)

    def follow(self, messages: Sequence[dict[str, Any]], answer: Sequence[int]) -> Generated:
        """What would come next after each beginning of `answer`, in one pass: where that is `answer` itself,
        it is what `generate` gives without an end."""
        prompt, logits = self.logits(messages, answer)
        best = logits.topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return Generated(prompt, best.indices[:, 0].tolist(), margins)

    @torch.inference_mode()
    def logits(
        self, messages: Sequence[dict[str, Any]], answer: Sequence[int]
    ) -> tuple[list[int], torch.Tensor]:
        """The expanded prompt, and logits `[tokens, vocab]` at each place of `answer` in float32."""
        ids, inputs = self._inputs(messages)
        out = self.model(**self._of_tokens([*ids, *answer[:-1]]), **inputs)
        return ids, out.logits[0, len(ids) - 1 :].float()

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The expanded prompt alone."""
        return self._inputs(messages)[0]

    def _inputs(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """The expanded prompt, and the pictures as the tower takes them."""
        images = [
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].split(",", 1)[1]))).convert("RGB")
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        rendered = self.tokenizer.apply_chat_template(
            [_plain(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        inputs: dict[str, torch.Tensor] = {}
        if images:
            pad = self.model.config.image_token_id
            inputs = dict(self.processor(images=images, return_tensors="pt"))
            sizes = iter((inputs["image_grid_thw"].prod(-1) // 4).tolist())
            ids = [t for token in ids for t in ([pad] * next(sizes) if token == pad else [token])]
        return ids, inputs

    def _of_tokens(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([list(ids)])
        pictures = (tokens == self.model.config.image_token_id).int()
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": pictures}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """What chat templates know: a picture is a part of the type "image"."""
    if isinstance(message["content"], str):
        return message
    parts = [part if part["type"] == "text" else {"type": "image"} for part in message["content"]]
    return {**message, "content": parts}


def assert_same_tokens(got: Sequence[int], reference: Generated) -> None:
    """Equal up to the first token where the reference itself was undecided."""
    for at, (ours, theirs) in enumerate(zip(got, reference.ids, strict=False)):
        if ours != theirs:
            assert reference.margins[at] < TIE, f"token {at} is {ours}, transformers says {theirs}"
            return
    assert len(got) == len(reference.ids)
