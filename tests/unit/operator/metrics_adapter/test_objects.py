"""What clients of the metrics APIs are told."""

import pytest

from epd_operator.api import quantity_value
from epd_operator.metrics_adapter.objects import CUSTOM, EXTERNAL, quantity, resources
from epd_operator.metrics_adapter.server import Attributes, attributes_of
from epd_operator.metrics_adapter.signals import SIGNALS, own_signals, pod_signals
from epd_operator.roles import TRAITS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (4096, "4096"),
        (0.5, "500m"),
        (2.5, "2500m"),
        (0.0123456, "12346u"),
        (1e-9, "1n"),
        (1e12, "1000000000000"),
    ],
)
def test_amounts_are_written_as_kubernetes_does(value: float, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.77, 123.456789, 99999.5, 3e-5])
def test_amounts_keep_their_size(value: float) -> None:
    assert float(quantity_value(quantity(value))) == pytest.approx(value, rel=1e-3)


def test_every_signal_is_listed_where_it_can_be_asked_for() -> None:
    external = [one["name"] for one in resources(EXTERNAL, "v1beta1")["resources"]]
    assert external == [signal.name for signal in SIGNALS]
    custom = {one["name"] for one in resources(CUSTOM, "v1beta2")["resources"]}
    assert custom == {f"pods/{signal.name}" for signal in SIGNALS if signal.component is None}


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("role", TRAITS)
def test_each_role_has_a_signal_of_its_own_that_its_pods_have(engine: str, role: str) -> None:
    own = [signal.name for signal, _ in own_signals(engine, role)]
    assert own
    assert set(own) <= {signal.name for signal in pod_signals(role)}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "/apis/custom.metrics.k8s.io/v1beta1/namespaces/ns/pods/%2A/m",
            Attributes("", "custom.metrics.k8s.io", "v1beta1", "ns", "pods", "m", "*"),
        ),
        (
            "/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/m",
            Attributes("", "external.metrics.k8s.io", "v1beta1", "ns", "m", verb="list"),
        ),
        (
            "/apis/custom.metrics.k8s.io/v1beta1/nodes/n/m",
            Attributes("", "custom.metrics.k8s.io", "v1beta1", "", "nodes", "m", "n"),
        ),
        ("/apis/custom.metrics.k8s.io/v1beta1", Attributes("/apis/custom.metrics.k8s.io/v1beta1")),
        ("/apis", Attributes("/apis")),
        ("/openapi/v2", Attributes("/openapi/v2")),
    ],
)
def test_a_path_is_what_kubernetes_would_ask_about(path: str, expected: Attributes) -> None:
    assert attributes_of("GET", path).spec() == expected.spec()
