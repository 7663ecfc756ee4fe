#!/usr/bin/env python3
"""Write the example pictures: one held-out handwritten digit of each kind, named by its word.

    .venv/bin/python examples/images/write_images.py [--model MODEL_DIR]

Of each digit it takes the most typical of the held-out scans that the model reads right.
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.models import digits_chat, digits_model
from examples.models.digits_data import BLACK, WHITE, Style, draw, load_split
from examples.models.evaluate import Reader

ON_WHITE = Style(paper=WHITE, ink=BLACK, scale=0.85)
ON_BLACK = Style(paper=BLACK, ink=WHITE, scale=0.85)

# Width and height in pixels, and style, by digit: some square, some not.
PICTURES = (
    ((112, 112), ON_WHITE),
    ((112, 112), ON_BLACK),
    ((140, 112), ON_WHITE),
    ((112, 112), ON_WHITE),
    ((112, 140), ON_BLACK),
    ((168, 168), ON_WHITE),
    ((84, 84), ON_BLACK),
    ((112, 112), ON_WHITE),
    ((224, 224), ON_BLACK),
    ((168, 112), ON_WHITE),
)


def example(reader: Reader, digit: int) -> Image.Image:
    """The held-out picture of this digit nearest to their mean to which the model answers right."""
    _, held_out = load_split()
    size, style = PICTURES[digit]
    question = {"type": "text", "text": "What digit is this?"}
    messages = [{"role": "user", "content": [{"type": "image"}, question]}]
    scans = held_out.scans[held_out.labels == digit]
    distances = ((scans - scans.mean(0)) ** 2).sum((1, 2))
    for row in distances.argsort(kind="stable"):
        picture = draw(scans[row], size, style)
        if reader.ask(messages, [picture]) == digits_chat.WORDS[digit]:
            return picture
    raise SystemExit(f"the model reads no held-out {digits_chat.WORDS[digit]} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=digits_model.MODEL_DIR)
    args = parser.parse_args()
    reader = Reader(args.model)
    for digit, word in enumerate(digits_chat.WORDS):
        example(reader, digit).save(Path(__file__).parent / f"{word}.png", optimize=True)


if __name__ == "__main__":
    main()
