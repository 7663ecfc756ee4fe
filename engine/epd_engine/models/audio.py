"""Sound as it goes from the decoder to a model family."""

import math
from dataclasses import dataclass

import numpy as np
import soxr


@dataclass(frozen=True)
class Waveform:
    """One channel of decoded sound: `samples` `[n]` float32, nominally in [-1, 1], at `rate` per second."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def length_at(self, rate: int) -> int:
        """How many samples this is at another rate."""
        return math.ceil(len(self.samples) * rate / self.rate)


def resample(sound: Waveform, rate: int) -> np.ndarray:
    """`[sound.length_at(rate)]` float32, by the steps of transformers' own loader."""
    if sound.rate == rate:
        return sound.samples
    wanted = sound.length_at(rate)
    samples = soxr.resample(sound.samples, sound.rate, rate, quality="soxr_hq")
    padded: np.ndarray = np.pad(samples, (0, max(0, wanted - len(samples))))[:wanted]
    return padded
