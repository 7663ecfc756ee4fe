"""Names of children are valid and distinct, whatever the resource is called."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epd_operator.api.names import BASE_LENGTH, SUFFIX_LENGTH, base_name, label_value
from epd_operator.render import child_name

from .documents import find, flag, main_container, rendered

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUFFIXES = st.sampled_from(["encoder", "pd", "store", "store-memory", "x" * SUFFIX_LENGTH])
NAMES = st.one_of(st.text(max_size=300), st.from_regex(r"[a-z0-9][-a-z0-9.]{0,250}[a-z0-9]", fullmatch=True))


@given(NAMES, SUFFIXES)
def test_every_child_has_a_valid_name(name: str, suffix: str) -> None:
    child = child_name(name, suffix)
    assert DNS_LABEL.fullmatch(child)
    assert child == f"{base_name(name)}-{suffix}"
    assert DNS_LABEL.fullmatch(label_value(name))


@given(NAMES, NAMES)
def test_two_resources_have_different_children(one: str, other: str) -> None:
    assume(one != other)
    assert child_name(one, "pd") != child_name(other, "pd")


@pytest.mark.parametrize("length", [1, BASE_LENGTH])
def test_a_name_that_fits_is_kept(length: int) -> None:
    name = "n" * length
    assert child_name(name, "encoder") == f"{name}-encoder"


def test_long_names_that_begin_alike_stay_apart() -> None:
    start = "a-very-long-name-" * 3
    assert child_name(f"{start}one", "pd") != child_name(f"{start}two", "pd")
    assert child_name(f"{start}one", "pd").startswith("a-very-long-name-")


def test_a_suffix_that_would_not_fit_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="longer"):
        child_name("digits", "x" * (SUFFIX_LENGTH + 1))


def test_the_proxy_of_a_long_name_looks_for_the_services_that_there_are() -> None:
    manifests = rendered(name="n" * 63)
    proxy = main_container(find(manifests, "Deployment", child_name("n" * 63, "proxy")))
    services = {one["metadata"]["name"] for one in manifests if one["kind"] == "Service"}
    assert {flag(proxy, "--encoder-service"), flag(proxy, "--pd-service")} < services
    assert all(len(one["metadata"]["name"]) <= 63 for one in manifests)
