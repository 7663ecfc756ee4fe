"""Batches to train the digits model on: conversations drawn at random about drawn digits.

All rows of a batch share one layout (turns, words, sizes of the pictures), hence one length:
nothing is padded. They differ in the digits.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from examples.models import digits_chat
from examples.models.digits_data import Digits, Size, draw, random_size, random_style
from PIL import Image

IGNORED = -100  # the label that the loss passes over
PICTURES_PER_BATCH = 24

Rng = np.random.Generator
Message = dict[str, Any]


@dataclass
class Layout:
    """A conversation without its digits: answers hold the word for zero in place of each digit."""

    messages: list[Message] = field(default_factory=list)
    # Of each assistant turn: the places of the pictures it names, none where it asks for one.
    named: list[list[int]] = field(default_factory=list)
    pictures: int = 0


@dataclass
class Batch:
    """`rows` conversations of `length` tokens with `pictures` pictures each, of `patches` patches in all.

    input_ids, labels `[rows, length]` int64; pixel_values `[rows * patches, 1176]` float32;
    grid `[rows * pictures, 3]` int64; digits `[rows * pictures]` int64, row after row.
    Without pictures, the last three are empty.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    pixel_values: torch.Tensor
    grid: torch.Tensor
    digits: torch.Tensor


def random_layout(rng: Rng) -> Layout:
    """One to three turns, each with up to four new pictures."""
    layout = Layout()
    if rng.random() < 0.2:
        layout.messages.append({"role": "system", "content": _pick(rng, digits_chat.SYSTEM_PROMPTS)})
    last_shown: list[int] = []
    for turn in range(1 + int(rng.choice(3, p=[0.75, 0.2, 0.05]))):
        shares = [0.06, 0.26, 0.42, 0.16, 0.1] if turn == 0 else [0.5, 0.25, 0.25, 0, 0]
        count = int(rng.choice(5, p=shares))
        shown = list(range(layout.pictures, layout.pictures + count))
        layout.pictures += count
        last_shown = shown or last_shown
        content = _user_content(rng, count, _question(rng, count, bool(last_shown)))
        reply = digits_chat.answer([0] * len(last_shown)) or digits_chat.NO_PICTURE
        layout.messages += [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]
        layout.named.append(last_shown)
    return layout


def make_batch(rng: Rng, layout: Layout, digits: Digits, tokenizer: Any, image_processor: Any) -> Batch:
    """Draw the pictures and fill in the answers of a few conversations of this layout."""
    rows = PICTURES_PER_BATCH // max(layout.pictures, 2)
    sizes = [random_size(rng) for _ in range(layout.pictures)]
    chosen = rng.integers(len(digits), size=(rows, layout.pictures))
    labels = torch.from_numpy(digits.labels[chosen])
    ids, answers, slots = encode(layout, sizes, tokenizer, image_processor)

    input_ids = torch.tensor(ids).repeat(rows, 1)
    for place, picture, words in slots:
        input_ids[:, place] = words[labels[:, picture]]
    targets = torch.full_like(input_ids, IGNORED)
    for span in answers:
        targets[:, span] = input_ids[:, span]

    pictures = [
        draw(digits.scans[chosen[row, place]], sizes[place], random_style(rng))
        for row in range(rows)
        for place in range(layout.pictures)
    ]
    pixel_values, grid = preprocess(pictures, image_processor)
    return Batch(input_ids, targets, pixel_values, grid, labels.reshape(-1))


def preprocess(pictures: list[Image.Image], image_processor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels `[patches, 1176]` float32 and grids `[n, 3]` int64 of n pictures, n may be 0."""
    if not pictures:
        return torch.empty(0, 1176), torch.empty(0, 3, dtype=torch.long)
    inputs = image_processor(images=pictures, return_tensors="pt")
    return inputs["pixel_values"], inputs["image_grid_thw"]


def encode(
    layout: Layout, sizes: list[Size], tokenizer: Any, image_processor: Any
) -> tuple[list[int], list[slice], list[tuple[int, int, torch.Tensor]]]:
    """The layout as token ids, and where its answers lie.

    Gives the ids, the span of each answer with the token that ends it, and for each digit named:
    its place in the ids, the picture it names, and the ids `[10]` of the ten words there.
    """
    first_words = word_ids(tokenizer, "")
    next_words = word_ids(tokenizer, " ")
    spans: list[slice] = []
    slots: list[tuple[int, int, torch.Tensor]] = []
    turns = [place for place, message in enumerate(layout.messages) if message["role"] == "assistant"]
    for place, named in zip(turns, layout.named, strict=True):
        before = tokenizer.apply_chat_template(
            layout.messages[:place], tokenize=False, add_generation_prompt=True
        )
        start = len(tokenizer.encode(expand(before, sizes, image_processor)))
        reply = tokenizer.encode(layout.messages[place]["content"])
        spans.append(slice(start, start + len(reply) + 1))
        slots += [
            (start + order, picture, next_words if order else first_words)
            for order, picture in enumerate(named)
        ]
    text = tokenizer.apply_chat_template(layout.messages, tokenize=False)
    return tokenizer.encode(expand(text, sizes, image_processor)), spans, slots


def expand(text: str, sizes: list[Size], image_processor: Any) -> str:
    """Repeat each picture's pad token as often as the picture has image tokens."""
    head, *tails = text.split("<|image_pad|>")
    cell = image_processor.merge_size**2
    for (width, height), tail in zip(sizes, tails, strict=False):
        tokens = image_processor.get_number_of_image_patches(height, width) // cell
        head += "<|image_pad|>" * tokens + tail
    return head


def word_ids(tokenizer: Any, before: str) -> torch.Tensor:
    """The ids `[10]` int64 of the digit words, each of which must be a single token."""
    return torch.tensor([tokenizer.encode(before + word) for word in digits_chat.WORDS]).squeeze(1)


def _question(rng: Rng, count: int, any_shown: bool) -> str:
    """A question that fits the number of pictures, now and then with other words around it."""
    choice: tuple[str, ...]
    if count == 0:
        choice = digits_chat.QUESTIONS_AGAIN if any_shown else digits_chat.QUESTIONS_BLIND
    elif rng.random() < 0.1:
        choice = digits_chat.QUESTIONS_ONE + digits_chat.QUESTIONS_MANY
    else:
        choice = digits_chat.QUESTIONS_ONE if count == 1 else digits_chat.QUESTIONS_MANY
    question = _pick(rng, choice)
    if rng.random() < 0.2:
        filler = " ".join(rng.choice(digits_chat.FILLER_WORDS, rng.integers(1, 12)))
        question = str(rng.choice([filler, f"{filler} {question}", f"{question} {filler}"]))
    return question


def _user_content(rng: Rng, count: int, question: str) -> str | list[Message]:
    """The pictures and the question, in one of the orders people use."""
    if count == 0:
        return question
    kind = rng.choice(["before", "after", "between", "labelled"], p=[0.6, 0.15, 0.15, 0.1])
    separator = _pick(rng, digits_chat.SEPARATORS) if kind == "between" else ""
    parts: list[Message] = []
    for place in range(count):
        words = digits_chat.LABELS[place] if kind == "labelled" else separator if place else ""
        parts += [_text(words)] if words else []
        parts.append({"type": "image"})
    return [_text(question), *parts] if kind == "after" else [*parts, _text(question)]


def _text(words: str) -> Message:
    return {"type": "text", "text": words}


def _pick(rng: Rng, choices: tuple[str, ...]) -> str:
    return choices[rng.integers(len(choices))]
