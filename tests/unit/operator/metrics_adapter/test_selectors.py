"""Label selectors, as kubectl and autoscalers write them."""

import pytest

from epd_operator.metrics_adapter.selectors import parse_selector

LABELS = {"app": "epd", "app.kubernetes.io/component": "encoder", "tier": "a", "empty": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("app=epd", True),
        ("app==epd,tier=a", True),
        ("app=epd,tier=b", False),
        ("app!=epd", False),
        ("missing!=x", True),
        ("app.kubernetes.io/component=encoder", True),
        ("app.kubernetes.io/component in (encoder, pd),tier notin (b,c)", True),
        ("app.kubernetes.io/component in (pd)", False),
        ("missing notin (x)", True),
        ("missing in (x)", False),
        ("app", True),
        ("missing", False),
        ("!missing", True),
        ("! app", False),
        ("empty=", True),
        ("app=", False),
        (" app = epd , tier in ( a ) ", True),
    ],
)
def test_what_selectors_select(text: str, expected: bool) -> None:
    assert parse_selector(text)(LABELS) is expected


@pytest.mark.parametrize(
    "text", ["=x", "a=b=c", "a in b", "a in (b", "a b", "a=b,,c=d", "a=b,", "a=" + "x" * 64, "a>b", "ä=b"]
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_selector(text)
