"""A trace of requests: bursts, a daily swing in minutes, and a share of pictures that comes and goes."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes (seconds), and its tokens. `media` is 0 where it has no picture."""

    time: float
    media: int
    text: int
    output: int


@dataclass(frozen=True)
class TraceShape:
    """Rates are requests a second. Periods differ, so that every mixture of load and pictures occurs."""

    seconds: float = 7200.0
    rate: float = 3.0
    swing: float = 0.6
    swing_period: float = 2700.0
    burst_factor: float = 2.0
    burst_every: float = 700.0
    burst_seconds: float = 90.0
    fewest_pictures: float = 0.05
    most_pictures: float = 0.85
    picture_period: float = 4000.0


PICTURE_TOKENS = (256, 256, 256, 576, 1024)  # squares of 448, 672 and 896 pixels
PICTURES = (1, 1, 1, 2, 3)


def trace(shape: TraceShape, seed: int) -> list[Arrival]:
    """In order of time; the same for the same seed."""
    chance = random.Random(seed)
    bursts = _bursts(shape, chance)
    highest = shape.rate * (1 + shape.swing) * shape.burst_factor
    arrivals, now = [], 0.0
    while (now := now + chance.expovariate(highest)) < shape.seconds:
        if chance.random() * highest < _rate(shape, bursts, now):  # thinning (Lewis and Shedler, 1979)
            arrivals.append(_arrival(shape, chance, now))
    return arrivals


def picture_share(shape: TraceShape, now: float) -> float:
    wave = (1 - math.cos(2 * math.pi * now / shape.picture_period)) / 2
    return shape.fewest_pictures + (shape.most_pictures - shape.fewest_pictures) * wave


def _bursts(shape: TraceShape, chance: random.Random) -> list[float]:
    begins, now = [], 0.0
    while (now := now + chance.expovariate(1 / shape.burst_every)) < shape.seconds:
        begins.append(now)
        now += shape.burst_seconds
    return begins


def _rate(shape: TraceShape, bursts: list[float], now: float) -> float:
    rate = shape.rate * (1 + shape.swing * math.sin(2 * math.pi * now / shape.swing_period))
    bursting = any(begin <= now < begin + shape.burst_seconds for begin in bursts)
    return rate * shape.burst_factor if bursting else rate


def _arrival(shape: TraceShape, chance: random.Random, now: float) -> Arrival:
    media = 0
    if chance.random() < picture_share(shape, now):
        media = sum(chance.choice(PICTURE_TOKENS) for _ in range(chance.choice(PICTURES)))
    text = min(2000, max(8, int(chance.lognormvariate(math.log(120), 0.8))))
    output = min(400, max(2, int(chance.lognormvariate(math.log(60), 0.7))))
    return Arrival(now, media, text, output)
