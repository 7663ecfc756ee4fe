"""Pure: the signals for those who have Prometheus: as queries, and as rules of prometheus-adapter.

They count on the labels that the chart's PodMonitor gives: namespace, pod, deployment, role and revision.
"""

from collections.abc import Mapping
from typing import Any

from .signals import PROXY, SIGNALS, Signal
from .window import QUANTILE

_RANGE = "1m"
_VLLM = "vllm:"


def sum_of(series: str, labels: Mapping[str, str]) -> str:
    """The sum of a series."""
    return f"sum({series}{{{_matchers(labels)}}})"


def own_query(signal: Signal, engine: str, labels: Mapping[str, str]) -> str:
    """A signal's value, summed up over pods; of percentiles the one of all that the pods have seen."""
    matchers = _matchers(_component_labels(signal, labels))
    return _aggregated(signal, [f"{name}{{{matchers}}}" for name in _names(signal, engine)], "")


def adapter_rules() -> dict[str, Any]:
    """Values of prometheus-adapter's chart that give the metrics APIs the same signals as our own adapter."""
    custom = [
        _custom(signal, engine)
        for signal in SIGNALS
        if signal.component is None
        for engine in _engines(signal)
    ]
    external = [_external(signal, engine) for signal in SIGNALS for engine in _engines(signal)]
    return {"rules": {"default": False, "custom": custom, "external": external}}


def _engines(signal: Signal) -> tuple[str, ...]:
    return ("native", "vllm")[: len(signal.sources)]


def _names(signal: Signal, engine: str) -> tuple[str, ...]:
    """The series of an engine; the last alternative is vLLM's, where it has one."""
    return signal.sources[-1 if engine == "vllm" else 0]


def _aggregated(signal: Signal, series: list[str], by: str, together: str = "sum") -> str:
    grouped = f" by ({by})" if by else ""
    if signal.reading == "p95":
        (one,) = series
        bucket = one.replace("{", "_bucket{", 1)
        buckets = f"sum(rate({bucket}[{_RANGE}])) by ({', '.join(filter(None, ['le', by]))})"
        return f"histogram_quantile({QUANTILE}, {buckets})"
    if signal.reading == "rate":
        series = [f"rate({one}[{_RANGE}])" for one in series]
    return " + ".join(f"{together}({one}){grouped}" for one in series)


def _custom(signal: Signal, engine: str) -> dict[str, Any]:
    return {
        **_rule(signal, engine),
        "metricsQuery": _aggregated(signal, _templates(signal, engine), "<<.GroupBy>>"),
    }


def _external(signal: Signal, engine: str) -> dict[str, Any]:
    by = "namespace, deployment" if signal.component == PROXY else "namespace, deployment, role"
    together = "avg" if signal.together == "mean" else "sum"
    query = _aggregated(signal, _templates(signal, engine), by, together)
    return {**_rule(signal, engine), "metricsQuery": query}


def _rule(signal: Signal, engine: str) -> dict[str, Any]:
    first = _names(signal, engine)[0] + ("_bucket" if signal.reading == "p95" else "")
    roles = "|".join(signal.roles) if signal.component is None else signal.component
    return {
        "seriesQuery": f'{first}{{namespace!="",pod!="",role=~"{roles}"}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"as": signal.name},
    }


def _templates(signal: Signal, engine: str) -> list[str]:
    return [f"{name}{{<<.LabelMatchers>>}}" for name in _names(signal, engine)]


def _component_labels(signal: Signal, labels: Mapping[str, str]) -> Mapping[str, str]:
    """What proxies say about encoders is at the proxies."""
    return {**labels, "role": PROXY} if signal.component == PROXY else labels


def _matchers(labels: Mapping[str, str]) -> str:
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in sorted(quoted.items()))
