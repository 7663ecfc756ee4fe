"""As much of an API server as the rules need: defaults are filled in, and rules evaluated at their places."""

import copy
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import cel

from epd_operator.api import quantity_value

Schema = dict[str, Any]


def with_defaults(schema: Schema, value: Any) -> Any:
    """The value with the schema's defaults in it."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        filled = {
            name: copy.deepcopy(one["default"])
            for name, one in properties.items()
            if "default" in one and name not in value
        } | value
        return {
            name: with_defaults(properties[name], one) if name in properties else one
            for name, one in filled.items()
        }
    if isinstance(value, list):
        return [with_defaults(schema["items"], entry) for entry in value]
    return value


def broken_rules(schema: Schema, new: Any, old: Any = None, path: str = "") -> Iterator[tuple[str, str]]:
    """Place and message of each rule that does not hold; rules of changes only with an old value."""
    for validation in schema.get("x-kubernetes-validations", []):
        rule = validation["rule"]
        if re.search(r"\boldSelf\b", rule) and old is None:
            continue
        if not _evaluate(rule, new, old):
            yield path, validation["message"]
    if isinstance(new, dict):
        for name, one in schema.get("properties", {}).items():
            if name in new:
                before = old.get(name) if isinstance(old, dict) else None
                yield from broken_rules(one, new[name], before, f"{path}.{name}".lstrip("."))
    elif isinstance(new, list):
        for index, entry in enumerate(new):
            # Entries of an atomic list have no old value of their own; no rule of ours asks for one.
            yield from broken_rules(schema["items"], entry, None, f"{path}[{index}]")


def _evaluate(rule: str, new: Any, old: Any) -> bool:
    context = cel.Context()
    context.add_variable("self", new)
    if old is not None:
        context.add_variable("oldSelf", old)
    context.add_function("quantity", _quantity)
    context.add_function("compareTo", lambda one, other: (one > other) - (one < other))
    context.add_function("isGreaterThan", lambda one, other: one > other)
    result = cel.evaluate(rule, context)
    assert isinstance(result, bool), f"{rule} is {result!r}"
    return result


def _quantity(text: str) -> int:
    # The library has no number type between the two; all sizes here are whole in thousandths.
    assert isinstance(text, str), "quantity() takes text only"
    return int(quantity_value(text) * Decimal(1000))
