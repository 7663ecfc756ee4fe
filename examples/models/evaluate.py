#!/usr/bin/env python3
"""Ask a saved digits model about the held-out digits, with plain transformers.

    .venv/bin/python examples/models/evaluate.py [MODEL_DIR]

Prints the share of right answers to single pictures and of wholly right ones to pairs, and ends
with status 1 where one is below its limit. Triples are printed for information.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.models import digits_chat, digits_model
from examples.models.digits_batches import Rng, expand, preprocess
from examples.models.digits_data import Digits, draw, load_split, plain_style, random_size

# Least share of right answers by number of pictures.
LIMITS = {1: 0.97, 2: 0.94}
BATCH = 32
SEED = 7


class Reader:
    """A model directory, loaded with the Auto classes that need no torchvision."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.image_processor = AutoImageProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder).eval()

    def prompt(self, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> list[int]:
        """The token ids of a conversation, its pictures' pad tokens repeated as the model wants them."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sizes = [picture.size for picture in pictures]
        ids: list[int] = self.tokenizer.encode(expand(text, sizes, self.image_processor))
        return ids

    def answers(self, prompts: list[list[int]], pictures: list[Image.Image]) -> list[str]:
        """Greedy answers to prompts of one length; `pictures` holds those of all prompts in order."""
        ids = torch.tensor(prompts)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if pictures:
            # Without the token types, the model would give image tokens the positions of text.
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
            inputs["pixel_values"], inputs["image_grid_thw"] = preprocess(pictures, self.image_processor)
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=16)
        replies = self.tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
        return [str(reply) for reply in replies]

    def ask(self, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> str:
        """The greedy answer to one conversation."""
        return self.answers([self.prompt(messages, pictures)], pictures)[0]


def question(count: int, rng: Rng) -> list[dict[str, Any]]:
    """One turn with `count` pictures and a question that fits them."""
    choices = digits_chat.QUESTIONS_ONE if count == 1 else digits_chat.QUESTIONS_MANY
    text = choices[rng.integers(len(choices))]
    parts = [{"type": "image"}] * count + [{"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def accuracy(reader: Reader, digits: Digits, count: int) -> float:
    """Share of wholly right answers to `count` pictures at once; each digit comes `count` times."""
    rng = np.random.default_rng([SEED, count])
    order = np.stack([rng.permutation(len(digits)) for _ in range(count)], axis=1)
    by_length: dict[int, list[tuple[list[int], list[Image.Image], str]]] = defaultdict(list)
    for rows in order:
        pictures = [draw(digits.scans[row], random_size(rng), plain_style(rng)) for row in rows]
        prompt = reader.prompt(question(count, rng), pictures)
        by_length[len(prompt)].append((prompt, pictures, digits_chat.answer(digits.labels[rows].tolist())))
    right = 0
    for cases in by_length.values():
        for start in range(0, len(cases), BATCH):
            prompts, pictures_of, expected = zip(*cases[start : start + BATCH], strict=True)
            replies = reader.answers(list(prompts), [p for pictures in pictures_of for p in pictures])
            right += sum(reply == wanted for reply, wanted in zip(replies, expected, strict=True))
    return right / len(digits)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", default=digits_model.MODEL_DIR)
    args = parser.parse_args()
    reader = Reader(args.model)
    _, held_out = load_split()
    good = True
    for count, name in ((1, "single pictures"), (2, "exact pairs"), (3, "exact triples")):
        share = accuracy(reader, held_out, count)
        limit = LIMITS.get(count)
        good = good and (limit is None or share >= limit)
        print(f"{name:<16} {share:6.1%}" + (f"  (at least {limit:.0%})" if limit else ""), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
