#!/usr/bin/env python3
"""Train the digits model from nothing and write its checkpoint.

    .venv/bin/python examples/models/train_digits.py [--out DIR] [--steps N] [--seed 0] [--threads 1]

First the vision tower alone learns to tell digits apart, under a linear head that is thrown away
afterwards. Then the whole model learns to name them in conversations. The same seed, number of
threads, machine and version of torch give the same weights.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.models import digits_model
from examples.models.digits_batches import (
    Batch,
    Rng,
    make_batch,
    preprocess,
    random_layout,
)
from examples.models.digits_data import Digits, draw, load_split, random_size, random_style

STEPS = 2500
WARM_UP_SHARE = 0.52  # of the steps, for the vision tower alone
WARM_UP_RATE = 3e-3
CHAT_RATE = 2e-3
WARM_UP_PICTURES = 64
BATCHES_PER_STEP = 3
WEIGHT_DECAY = 0.05
# The digit head goes on teaching the vision tower, lest the words alone let it drift.
HEAD_LOSS_SHARE = 0.3


# Patches `[patches, 1176]` float32, grids `[n, 3]` int64 and labels `[n]` int64 of n pictures.
Pictures = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
T = TypeVar("T")


class DigitsTrainer:
    """The model, the head over its picture embeddings, and everything drawn at random."""

    def __init__(self, seed: int, digits: Digits) -> None:
        torch.manual_seed(seed)
        self.rng: Rng = np.random.default_rng(seed)
        self.digits = digits
        self.tokenizer = digits_model.build_tokenizer()
        # The backend of PIL also where torchvision is installed: its pixels differ a little.
        self.image_processor = Qwen2VLImageProcessorPil(
            **digits_model.processor_files()["preprocessor_config.json"]
        )
        self.model: Qwen2_5_VLForConditionalGeneration = digits_model.build_model()
        embed_patches_by_product(self.model)
        self.head = nn.Linear(self.model.config.vision_config.out_hidden_size, 10)

    def draw_pictures(self) -> Pictures:
        """Pictures for the vision tower alone."""
        chosen = self.rng.integers(len(self.digits), size=WARM_UP_PICTURES)
        pictures = [
            draw(self.digits.scans[row], random_size(self.rng), random_style(self.rng)) for row in chosen
        ]
        return *preprocess(pictures, self.image_processor), torch.from_numpy(self.digits.labels[chosen])

    def draw_chats(self) -> list[Batch]:
        """A few batches of conversations, for one step."""
        return [
            make_batch(self.rng, random_layout(self.rng), self.digits, self.tokenizer, self.image_processor)
            for _ in range(BATCHES_PER_STEP)
        ]

    def vision_loss(self, pictures: Pictures) -> torch.Tensor:
        """Loss, a scalar, of the digit head."""
        pixel_values, grid, labels = pictures
        features = self.model.model.get_image_features(pixel_values, grid)
        return self.head_loss(features.pooler_output, labels)

    def chat_loss(self, batches: list[Batch]) -> torch.Tensor:
        """Loss, a scalar, over the answers of all batches."""
        return torch.stack([self.batch_loss(batch) for batch in batches]).mean()

    def batch_loss(self, batch: Batch) -> torch.Tensor:
        """Loss, a scalar, of the words in the answers and of the digit head."""
        if not len(batch.grid):
            loss: torch.Tensor = self.model(input_ids=batch.input_ids, labels=batch.labels).loss
            return loss
        features = self.model.model.get_image_features(batch.pixel_values, batch.grid)
        output = self.model(
            input_ids=batch.input_ids,
            labels=batch.labels,
            position_ids=self.positions(batch),
            mm_encoder_outputs={"image": features},
        )
        loss = output.loss + HEAD_LOSS_SHARE * self.head_loss(features.pooler_output, batch.digits)
        return loss

    def positions(self, batch: Batch) -> torch.Tensor:
        """M-RoPE positions `[3, rows, length]` int64; every row has the same."""
        rows = len(batch.input_ids)
        row = batch.input_ids[:1]
        is_image = (row == self.model.config.image_token_id).int()
        grid = batch.grid[: len(batch.grid) // rows]
        positions: torch.Tensor
        positions, _ = self.model.model.get_rope_index(row, is_image, image_grid_thw=grid)
        return positions.expand(3, rows, -1)

    def head_loss(self, embeddings: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the digit head; one `[tokens, hidden]` per picture, labels `[n]`."""
        pooled = torch.stack([picture.mean(0) for picture in embeddings])
        return cross_entropy(self.head(pooled), labels)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        yield from self.head.parameters()


def embed_patches_by_product(model: Qwen2_5_VLForConditionalGeneration) -> None:
    """Embed patches by one matrix product: the same numbers as the 3-d convolution, in half the time.

    The kernel covers a patch exactly, so `[patches, 1176]` times its flattened weight is all of it.
    """
    embed = model.model.visual.patch_embed
    embed.forward = lambda pixels: pixels @ embed.proj.weight.flatten(1).T


def ahead(make: Callable[[], T], count: int) -> Iterator[T]:
    """Call `make` `count` times, each time while the caller works on the result before.

    One thread calls it, in order: the random numbers do not depend on who is faster.
    """
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(make)
        for _ in range(count - 1):
            ready, coming = coming.result(), pool.submit(make)
            yield ready
        yield coming.result()


def run_phase(
    name: str,
    trainer: DigitsTrainer,
    make: Callable[[], T],
    loss_of: Callable[[T], torch.Tensor],
    steps: int,
    rate: float,
) -> None:
    """Minimise one loss for a number of steps: AdamW, a short rise of the rate, then a cosine."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    rise = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / rise, 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))),
    )
    start = time.monotonic()
    running = 0.0
    for step, sample in enumerate(ahead(make, steps), 1):
        loss = loss_of(sample)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(list(trainer.parameters()), 1.0)
        optimizer.step()
        schedule.step()
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 50 == 0 or step == steps:
            spent = time.monotonic() - start
            left = spent / step * (steps - step)
            print(f"{name} {step}/{steps}  loss {running:.3f}  {spent:.0f} s, {left:.0f} s to go", flush=True)


def train(steps: int, seed: int) -> DigitsTrainer:
    """Both phases, deterministic in `steps` and `seed`."""
    torch.use_deterministic_algorithms(True)
    # Only code that reads memory before writing it would need this, and it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    train_digits, _ = load_split()
    trainer = DigitsTrainer(seed, train_digits)
    warm_up = max(1, round(steps * WARM_UP_SHARE))
    run_phase("digits", trainer, trainer.draw_pictures, trainer.vision_loss, warm_up, WARM_UP_RATE)
    run_phase("chat", trainer, trainer.draw_chats, trainer.chat_loss, max(1, steps - warm_up), CHAT_RATE)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=digits_model.MODEL_DIR)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start = time.monotonic()
    trainer = train(args.steps, args.seed)
    digits_model.save(trainer.model, trainer.tokenizer, args.out)
    print(f"trained in {time.monotonic() - start:.0f} s: {args.out}")


if __name__ == "__main__":
    main()
