"""Quantities and durations mean what Kubernetes means by them."""

from decimal import Decimal

import pytest

from epd_operator.api import duration_seconds, quantity_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"),
        ("2", "2"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("500m", "0.5"),
        ("10Gi", "10737418240"),
        ("1.5Ki", "1536"),
        ("3k", "3000"),
        ("1M", "1000000"),
        ("2E", "2000000000000000000"),
        ("1e3", "1000"),
        ("1E-2", "0.01"),
        ("7n", "0.000000007"),
        ("7u", "0.000007"),
    ],
)
def test_a_quantity_is_a_number(text: str, value: str) -> None:
    assert quantity_value(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "-1", "1gi", "1Kii", "0x10", "1e", "10GiB", "1\n"])
def test_other_text_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity_value(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("0s", 0), ("1m1ms", 60.001)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "7d", "1.5h", "-1s", "10 m", "1h 30m", "1s\n"])
def test_other_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        duration_seconds(text)
