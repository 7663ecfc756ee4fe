"""The handwritten digits of scikit-learn: the fixed split, and pictures drawn from them."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Fixed for good: weights trained on one split must never be judged by another.
SPLIT_SEED = 2024
HELD_OUT_SHARE = 0.2

RESAMPLES = (
    Image.Resampling.NEAREST,
    Image.Resampling.BILINEAR,
    Image.Resampling.BICUBIC,
    Image.Resampling.LANCZOS,
)
# Blocks are the hardest to learn: the edges between them look like strokes.
BLOCKY_FIRST = (0.46, 0.18, 0.18, 0.18)
BLACK = (0, 0, 0)
WHITE = (255, 255, 255)

Colour = tuple[int, int, int]
Size = tuple[int, int]  # width and height in pixels, as PIL has them


@dataclass(frozen=True)
class Digits:
    """Scans `[n, 8, 8]` uint8 (0 paper, 255 ink), labels `[n]` int64, rows `[n]` of the data set."""

    scans: NDArray[np.uint8]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Style:
    """How a digit is drawn: colours, filter, and where its box lies on the canvas."""

    paper: Colour = BLACK
    ink: Colour = WHITE
    resample: Image.Resampling = Image.Resampling.BICUBIC
    scale: float = 1.0  # edge of the digit's box over the shorter edge of the canvas
    stretch: float = 1.0  # the box's width over its height
    angle: float = 0.0  # degrees, counterclockwise
    place: tuple[float, float] = (0.5, 0.5)  # share of the free room left of and above the box


@cache
def load_split() -> tuple[Digits, Digits]:
    """The digits to train on and those held out, both with all ten digits in equal shares."""
    images, labels = load_digits(return_X_y=True)
    scans = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    rows = np.arange(len(labels), dtype=np.int64)
    parts = train_test_split(rows, test_size=HELD_OUT_SHARE, random_state=SPLIT_SEED, stratify=labels)
    train, held_out = (Digits(scans[part], labels[part].astype(np.int64), part) for part in parts)
    return train, held_out


def draw(scan: NDArray[np.uint8], size: Size, style: Style) -> Image.Image:
    """One scan `[8, 8]` as an RGB picture of `size` (width, height)."""
    width, height = size
    edge = max(style.scale * min(size), min(8, *size))  # fewer pixels than the scan has would lose strokes
    box_width = min(width, max(1, round(edge * style.stretch**0.5)))
    box_height = min(height, max(1, round(edge / style.stretch**0.5)))
    mask = Image.fromarray(scan).resize((box_width, box_height), style.resample)
    if style.angle:
        mask = mask.rotate(style.angle, Image.Resampling.BILINEAR)
    corner = (
        round(style.place[0] * (width - box_width)),
        round(style.place[1] * (height - box_height)),
    )
    picture = Image.new("RGB", size, style.paper)
    picture.paste(style.ink, corner, mask)
    return picture


def random_style(rng: np.random.Generator) -> Style:
    """A style for training: two in five plain, the others moved, turned and recoloured a little."""
    if rng.random() < 0.4:
        return plain_style(rng)
    paper, ink = _colour(rng, 0, 60), _colour(rng, 190, 256)
    if rng.random() < 0.5:
        paper, ink = ink, paper
    return Style(
        paper,
        ink,
        RESAMPLES[rng.choice(len(RESAMPLES), p=BLOCKY_FIRST)],
        scale=rng.uniform(0.7, 1.0),
        stretch=rng.uniform(0.85, 1.18),
        angle=rng.uniform(-10, 10),
        place=(rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)),
    )


def plain_style(rng: np.random.Generator) -> Style:
    """As people draw one: upright, centred, black on white or the reverse, half of them without a margin."""
    paper, ink = (BLACK, WHITE) if rng.random() < 0.5 else (WHITE, BLACK)
    resample = RESAMPLES[rng.integers(len(RESAMPLES))]
    return Style(paper, ink, resample, scale=min(1.0, rng.uniform(0.75, 1.25)))


def random_size(rng: np.random.Generator) -> Size:
    """Width and height of a picture: the shorter edge 8 to 180 pixels, the longer at most twice that."""
    if rng.random() < 0.5:
        edge = int(rng.choice([8, 28, 56, 64, 84, 100, 112, 128]))
        return edge, edge
    shorter = round(2 ** rng.uniform(4.5, 7.5))
    longer = round(shorter * 2 ** (rng.random() ** 2))
    return (shorter, longer) if rng.random() < 0.5 else (longer, shorter)


def _colour(rng: np.random.Generator, low: int, high: int) -> Colour:
    """A colour with all three channels in `[low, high)`, most often a grey."""
    if rng.random() < 0.6:
        grey = int(rng.integers(low, high))
        return grey, grey, grey
    red, green, blue = (int(value) for value in rng.integers(low, high, 3))
    return red, green, blue
