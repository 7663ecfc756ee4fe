"""Quantities in the form in which the API server gives them back.

Otherwise what is rendered (`0.2`) and what is stored (`200m`) differ for ever.
"""

import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal, localcontext

from ..api import quantity_value

_NANO = Decimal("1e-9")
_MILLI = Decimal("1e-3")
_MOST = Decimal(2**63 - 1)
_DIGITS = 400  # enough for any quantity that the resource admits, exactly
_SUFFIX = re.compile(r"[\d.]+(.*)")
_DECIMAL_SUFFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
_BINARY_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def canonical_quantity(quantity: str | int | float, finest: Decimal = _NANO) -> str:
    """The canonical form: no fraction, the largest suffix that leaves a whole number, of the same kind.

    Amounts finer than `finest` are rounded up to it, as the API server does. Raises ValueError for what is
    no quantity.
    """
    text = str(quantity)
    with localcontext() as context:
        context.prec = _DIGITS
        amount = min(quantity_value(text), _MOST)
        if amount > 0:
            amount = _rounded_up(max(amount, _NANO), _NANO)
        suffix = _suffix_of(text)
        # The server picks the kind of suffix before it rounds to `finest`.
        binary = suffix.endswith("i") and amount >= 1
        amount = _rounded_up(amount, finest)
        if amount == 0:
            return "0"
        # Without a binary suffix to show, the kind is lost at the next reading: decimal from the start.
        if binary and amount >= 1024 and amount % 1024 == 0:
            return _with_binary_suffix(int(amount))
        number, exponent = _thousands(amount)
        if len(suffix) > 1 and suffix[0] in "eE":
            return f"{number}e{exponent}" if exponent else str(number)
        return f"{number}{_DECIMAL_SUFFIXES[exponent]}"


def canonical_resources(resources: Mapping[str, str | int | float]) -> dict[str, str]:
    """Requests or limits in canonical form; of these the API server keeps no more than thousandths."""
    return {name: canonical_quantity(quantity, _MILLI) for name, quantity in resources.items()}


def _suffix_of(text: str) -> str:
    match = _SUFFIX.fullmatch(text)
    assert match is not None, "quantity_value has read it"
    return match.group(1)


def _rounded_up(amount: Decimal, unit: Decimal) -> Decimal:
    return (amount / unit).to_integral_value(ROUND_CEILING) * unit


def _thousands(amount: Decimal) -> tuple[int, int]:
    """The amount as a whole number and the largest power of ten that is a multiple of three."""
    exponent = -9
    number = int(amount.scaleb(9))
    while number % 1000 == 0 and exponent < 18:
        number //= 1000
        exponent += 3
    return number, exponent


def _with_binary_suffix(number: int) -> str:
    power = 0
    while number % 1024 == 0 and power < len(_BINARY_SUFFIXES) - 1:
        number //= 1024
        power += 1
    return f"{number}{_BINARY_SUFFIXES[power]}"
