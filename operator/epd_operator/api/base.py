"""What every part of the resource has in common, and the small types its fields are made of."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


class Part(BaseModel):
    """A part of the resource: camelCase outside, immutable, unknown fields refused.

    Types are strict as in Kubernetes ("2" is no number), and each field's docstring is its
    description in the schema.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        defer_build=True,
    )


_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+)?")
_QUANTITY_SCALE = {
    **{suffix: Decimal(1000) ** power for suffix, power in zip("num", (-3, -2, -1), strict=True)},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}

_DURATION = re.compile(r"(?:\d{1,5}(?:h|ms|m|s)){1,4}")
_DURATION_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def quantity_value(quantity: str) -> Decimal:
    """The number that a Kubernetes quantity stands for (`10Gi`, `500m`, `1e3`).

    Raises ValueError for text that is no quantity.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity")
    number, suffix = match.groups()
    if suffix is None:
        return Decimal(number)
    if suffix in _QUANTITY_SCALE:
        return Decimal(number) * _QUANTITY_SCALE[suffix]
    try:
        return Decimal(number + suffix)
    except ArithmeticError:
        raise ValueError(f"{quantity!r} is beyond all bounds") from None


def duration_seconds(duration: str) -> float:
    """Seconds of a duration in the Gateway API's form (`90s`, `10m`, `1h30m`).

    Raises ValueError for text that is no duration.
    """
    if _DURATION.fullmatch(duration) is None:
        raise ValueError(f"{duration!r} is no duration")
    return sum(
        int(number) * _DURATION_SECONDS[unit] for number, unit in re.findall(r"(\d+)(h|ms|m|s)", duration)
    )


def _to_quantity(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        return value
    raise PydanticCustomError("quantity", 'must be a quantity such as 2, 500m, 10Gi or, in quotes, "0.5"')


def _to_duration(value: object) -> object:
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return value
    raise PydanticCustomError("duration", "must be a duration in h, m, s and ms, such as 90s, 10m or 1h30m")


Quantity = Annotated[
    str,
    BeforeValidator(_to_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": 0,
            "maxLength": 32,
            "pattern": f"^{_QUANTITY.pattern}$",
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""An amount as Kubernetes writes it."""

Duration = Annotated[
    str,
    BeforeValidator(_to_duration),
    WithJsonSchema({"type": "string", "maxLength": 32, "pattern": f"^{_DURATION.pattern}$"}),
]
"""A length of time as the Gateway API writes it."""

FreeObject = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
]
"""An object of a Kubernetes type that is passed on as it is."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
"""A DNS label."""

ObjectName = Annotated[
    str, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
"""The name of another Kubernetes object: a DNS subdomain."""

Timestamp = Annotated[
    str, StringConstraints(min_length=1, max_length=64), Field(json_schema_extra={"format": "date-time"})
]
"""A moment as Kubernetes writes it: `2026-01-31T12:00:00Z`."""

Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]
"""Short text."""

Text = Annotated[str, StringConstraints(max_length=4096)]
"""Longer text: an argument, an environment variable's value, a message."""

Labels = Annotated[dict[Word, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)]
Annotations = Annotated[
    dict[Word, Annotated[str, StringConstraints(max_length=262144)]], Field(max_length=64)
]


def list_map_by(key: str) -> dict[str, Any]:
    """Schema of a list whose entries are told apart by one field: server-side apply merges it entry by entry,
    and the API server refuses the same key twice."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
