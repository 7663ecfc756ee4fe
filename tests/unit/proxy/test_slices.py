"""Which endpoints of a Service's slices get traffic."""

from __future__ import annotations

from typing import Any

import pytest

from epd_proxy.slices import service_of, usable


def piece(*endpoints: dict[str, Any], name: str = "d-pd-1", family: str = "IPv4", port: int = 8000):
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "d-pd"}},
        "addressType": family,
        "ports": [{"name": "metrics", "port": 9000}, {"name": "http", "port": port}],
        "endpoints": list(endpoints),
    }


def pod(address: str, uid: str | None = None, **conditions: bool | None) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "uid": uid}} if uid else {}
    return {"addresses": [address], "conditions": conditions, **target}


def urls(*slices) -> list[str]:
    return [origin.url for origin in usable(slices)]


def test_a_slice_names_its_service():
    assert service_of(piece()) == "d-pd"
    assert service_of({"metadata": {"name": "x"}}) == ""


def test_the_port_named_http_is_used():
    assert urls(piece(pod("10.0.0.1", ready=True), port=8123)) == ["http://10.0.0.1:8123"]


@pytest.mark.parametrize(
    ("conditions", "used"),
    [
        ({"ready": True}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        # A Service that publishes unready addresses calls all of them ready.
        ({"ready": True, "serving": False}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
)
def test_ready_and_not_terminating(conditions, used):
    assert bool(urls(piece(pod("10.0.0.1", **conditions)))) == used


def test_a_url_of_an_ipv6_address():
    assert urls(piece(pod("fd00::2"), family="IPv6")) == ["http://[fd00::2]:8000"]
    (origin,) = usable([piece(pod("fd00::2"), family="IPv6")])
    assert (origin.host, origin.port) == ("fd00::2", 8000)


def test_a_pod_with_two_families_is_one_instance():
    both = [piece(pod("fd00::2", "a"), name="six", family="IPv6"), piece(pod("10.0.0.2", "a"), name="v4")]
    assert urls(*both) == urls(*reversed(both)) == ["http://10.0.0.2:8000"]


def test_an_endpoint_in_two_slices_is_one_and_ends_by_either():
    assert urls(piece(pod("10.0.0.1", "a")), piece(pod("10.0.0.1", "a"), name="2")) == [
        "http://10.0.0.1:8000"
    ]
    stale = piece(pod("10.0.0.1", "a", ready=True), pod("10.0.0.2", "b"))
    newer = piece(pod("10.0.0.1", "a", ready=False, terminating=True), name="2")
    assert urls(stale, newer) == urls(newer, stale) == ["http://10.0.0.2:8000"]


def test_what_is_no_pod_is_told_apart_by_address_and_port():
    two = [piece(pod("10.0.0.1"), port=1), piece(pod("10.0.0.1"), name="2", port=2)]
    assert sorted(urls(*two)) == ["http://10.0.0.1:1", "http://10.0.0.1:2"]


def test_another_pod_at_an_address_is_told_apart():
    (before,) = usable([piece(pod("10.0.0.1", "a"))]).values()
    (after,) = usable([piece(pod("10.0.0.1", "b"))]).values()
    assert before != after


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": {"name": "x"}, "addressType": "IPv4", "endpoints": None, "ports": None},
        piece({"addresses": ["host.example"]}, family="FQDN"),
        piece({"addresses": []}),
        {**piece(pod("10.0.0.1")), "ports": [{"name": "other", "port": 1}]},
        {**piece(pod("10.0.0.1")), "ports": [{"name": "http"}]},
    ],
)
def test_what_cannot_be_used_is_left_out(odd):
    assert urls(odd) == []
