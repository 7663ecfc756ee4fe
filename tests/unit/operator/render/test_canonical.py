"""What is rendered looks as the API server gives it back."""

import re
from decimal import Decimal, localcontext

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epd_operator.api import quantity_value
from epd_operator.render import RenderError
from epd_operator.render.quantities import canonical_quantity, canonical_resources

from .documents import encoder, main_container

NANO = Decimal("1e-9")
SUFFIXES = [
    "",
    "n",
    "u",
    "m",
    "k",
    "M",
    "G",
    "T",
    "P",
    "E",
    "Ki",
    "Mi",
    "Gi",
    "Ti",
    "Pi",
    "Ei",
    "e3",
    "E-2",
    "e0",
]
QUANTITIES = st.builds(
    lambda whole, fraction, suffix: f"{whole}{fraction}{suffix}",
    st.integers(0, 10**12),
    st.sampled_from(["", ".", ".5", ".125", ".001", ".999999999999"]),
    st.sampled_from(SUFFIXES),
)


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("0", "0"),
        ("0Gi", "0"),
        ("2", "2"),
        ("0.2", "200m"),
        ("0.50", "500m"),
        ("1000m", "1"),
        ("1500", "1500"),
        ("100000", "100k"),
        ("1000M", "1G"),
        ("1024Mi", "1Gi"),
        ("1000Mi", "1000Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ki", "512"),
        ("1.3Ki", "1331200m"),
        (".001Ki", "1024m"),
        (".000000001Ki", "1024n"),
        (".000000000001Ki", "2n"),
        ("1e3", "1e3"),
        ("1e4", "10e3"),
        ("1E-2", "10e-3"),
        ("1e0", "1"),
        ("0.1n", "1n"),
        ("1e-99", "1e-9"),
        ("100E", "9223372036854775807"),
        ("1e999999", "9223372036854775807"),
    ],
)
def test_the_form_that_the_api_server_stores(written: str, stored: str) -> None:
    assert canonical_quantity(written) == stored


@given(QUANTITIES)
@example("1113562.5Ki")
def test_the_amount_stays_and_a_second_time_changes_nothing(written: str) -> None:
    stored = canonical_quantity(written)
    with localcontext(prec=100):
        bounded = min(quantity_value(written), Decimal(2**63 - 1))
        assert 0 <= quantity_value(stored) - bounded < NANO
    assert canonical_quantity(stored) == stored
    assert re.fullmatch(r"\d+\D*(-?\d+)?", stored)


@given(
    st.integers(0, 10**6),
    st.sampled_from([("Gi", 1024, "Mi"), ("Mi", 1024, "Ki"), ("k", 1000, ""), ("", 1000, "m")]),
)
def test_one_amount_written_twice_looks_the_same(number: int, units: tuple[str, int, str]) -> None:
    large, factor, small = units
    assert canonical_quantity(f"{number}{large}") == canonical_quantity(f"{number * factor}{small}")


def test_resources_keep_thousandths() -> None:
    assert canonical_resources({"cpu": "0.0001", "memory": "1.5Ki", "nvidia.com/gpu": 1}) == {
        "cpu": "1m",
        "memory": "1536",
        "nvidia.com/gpu": "1",
    }


@pytest.mark.parametrize("text", ["", "1x", "-1", "Gi", "1e", "1e99999999999999999999"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        canonical_quantity(text)


def test_a_bad_quantity_in_a_pod_template_is_named() -> None:
    container = {"name": "engine", "resources": {"limits": {"cpu": "many"}}}
    with pytest.raises(RenderError) as caught:
        encoder(podTemplate={"spec": {"containers": [container]}})
    assert caught.value.path == "spec.roles.encoder.podTemplate.spec.containers[engine].resources.limits"


def test_what_the_api_server_leaves_out_is_left_out() -> None:
    container = {"name": "engine", "tty": False, "env": [{"name": "A", "value": ""}]}
    spec = {"hostNetwork": False, "nodeSelector": {}, "containers": [container]}
    deployment = encoder(podTemplate={"spec": spec}, extraArgs=[])
    pod = deployment["spec"]["template"]["spec"]
    assert not {"hostNetwork", "nodeSelector"} & set(pod)
    assert "tty" not in main_container(deployment)
    assert {"name": "A"} in main_container(deployment)["env"]
    assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]
