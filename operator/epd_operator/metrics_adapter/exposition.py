"""Pure: what a pod's /metrics says of the few series that matter here."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MOST_BYTES = 4 << 20
"""An answer longer than this is none."""
_MOST_BUCKETS = 256
_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')
_BUCKET = "_bucket"


@dataclass(frozen=True)
class Exposition:
    """The wanted series of one look, labels added up."""

    values: Mapping[str, float] = field(default_factory=dict)
    """Gauges and counters, by name."""
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Histograms by name: for each upper bound how many observations were not above it."""


def read_exposition(body: bytes, wanted: Collection[str]) -> Exposition:
    """The wanted series of a text in Prometheus' format; what else it says is not looked at.

    Raises ValueError for a text that cannot be: too long, no UTF-8, numbers that are none.
    """
    if len(body) > MOST_BYTES:
        raise ValueError(f"is longer than {MOST_BYTES} bytes")
    values: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for line in body.decode().splitlines():
        name = re.split(r"[{ \t]", line, maxsplit=1)[0]
        histogram = name.removesuffix(_BUCKET)
        if name not in wanted and (histogram not in wanted or histogram == name):
            continue
        parsed = _LINE.fullmatch(line)
        if parsed is None:
            raise ValueError(f"no sample: {line[:100]!r}")
        value = _number(parsed[3])
        if name in wanted:
            values[name] += value
        elif (bound := _BOUND.search(parsed[2] or "")) is not None:
            buckets[histogram][float(bound[1])] += value
            if len(buckets[histogram]) > _MOST_BUCKETS:
                raise ValueError(f"{histogram} has more than {_MOST_BUCKETS} buckets")
    return Exposition(dict(values), {name: dict(sorted(found.items())) for name, found in buckets.items()})


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{text!r} is no amount")
    return number
