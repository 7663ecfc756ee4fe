"""Scaling of a role: the shape of HorizontalPodAutoscaler v2, with its field names."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .base import Labels, Part, Quantity, Word


class LabelSelector(Part):
    """Which series of a metric count."""

    match_labels: Labels = Field(default={})
    """Labels that must have these values."""


class MetricIdentifier(Part):
    """A metric of the custom or external metrics API."""

    name: Word
    """The metric's name."""
    selector: LabelSelector | None = None
    """Narrows the metric down by labels."""


class MetricTarget(Part):
    """The value to hold."""

    type: Literal["Utilization", "Value", "AverageValue"]
    """What the number means: percent of the request, the whole value, or the mean per pod."""
    average_utilization: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Percent of the pods' requests (type Utilization)."""
    value: Quantity | None = None
    """The whole value (type Value)."""
    average_value: Quantity | None = None
    """The mean per pod (type AverageValue)."""

    @model_validator(mode="after")
    def _has_its_number(self) -> Self:
        field = self.type[0].lower() + self.type[1:]
        field = "averageUtilization" if field == "utilization" else field
        numbers = {
            "averageUtilization": self.average_utilization,
            "value": self.value,
            "averageValue": self.average_value,
        }
        if [name for name, number in numbers.items() if number is not None] != [field]:
            raise PydanticCustomError(
                "target",
                "type {type} takes `{field}` and no other number",
                {"type": self.type, "field": field},
            )
        return self


class ResourceMetric(Part):
    """A resource of the pods."""

    name: Word
    """`cpu`, `memory` or another resource."""
    target: MetricTarget
    """The value to hold."""


class PodsMetric(Part):
    """A metric that each pod has, such as an encoder's queued media tokens."""

    metric: MetricIdentifier
    """The metric."""
    target: MetricTarget
    """The value to hold."""


class ExternalMetric(Part):
    """A metric of no Kubernetes object."""

    metric: MetricIdentifier
    """The metric."""
    target: MetricTarget
    """The value to hold."""


class Metric(Part):
    """One signal to scale on."""

    type: Literal["Resource", "Pods", "External"]
    """Which of the fields beside it is set."""
    resource: ResourceMetric | None = None
    """A resource of the pods (type Resource)."""
    pods: PodsMetric | None = None
    """A metric that each pod has (type Pods)."""
    external: ExternalMetric | None = None
    """A metric of no Kubernetes object (type External)."""

    @model_validator(mode="after")
    def _has_its_source(self) -> Self:
        sources = {"resource": self.resource, "pods": self.pods, "external": self.external}
        if [name for name, source in sources.items() if source is not None] != [self.type.lower()]:
            raise PydanticCustomError(
                "metric",
                "type {type} takes `{field}` and no other source",
                {"type": self.type, "field": self.type.lower()},
            )
        return self


class ScalingPolicy(Part):
    """How much may change in one period."""

    type: Literal["Pods", "Percent"]
    """What `value` counts."""
    value: Annotated[int, Field(ge=1, le=10000)]
    """Pods or percent."""
    period_seconds: Annotated[int, Field(ge=1, le=1800)]
    """The period, in seconds."""


class ScalingRules(Part):
    """How fast to go in one direction."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """Seconds of past recommendations that are looked at."""
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    """Which of the policies counts."""
    policies: list[ScalingPolicy] = Field(default=[], max_length=16)
    """The policies."""
    tolerance: Quantity | None = None
    """Deviation from the target that is ignored."""


class Behavior(Part):
    """How fast to go up and down."""

    scale_up: ScalingRules | None = None
    """Rules for more replicas."""
    scale_down: ScalingRules | None = None
    """Rules for fewer replicas."""


class Autoscaling(Part):
    """Replicas that follow load."""

    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """The fewest replicas; 0 for encoders only, and where the cluster's autoscaler can do that."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """The most replicas."""
    provider: Literal["builtin", "prometheus-adapter", "keda", "resource"] = "builtin"
    """Where the signals come from: the operator's own metrics adapter, prometheus-adapter, KEDA, or CPU and
    memory only."""
    metrics: list[Metric] = Field(default=[], max_length=16)
    """What to scale on; the role's own signal where empty."""
    behavior: Behavior | None = None
    """How fast to go up and down."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise PydanticCustomError(
                "order",
                "minReplicas ({low}) must not be more than maxReplicas ({high})",
                {"low": self.min_replicas, "high": self.max_replicas},
            )
        return self

    @model_validator(mode="after")
    def _can_be_woken(self) -> Self:
        told_from_outside = not self.metrics or any(metric.type == "External" for metric in self.metrics)
        if self.min_replicas == 0 and (self.provider == "resource" or not told_from_outside):
            raise PydanticCustomError(
                "wake",
                "minReplicas 0 needs a metric that is there without pods: another provider than resource, "
                "and of metrics that are given one of type External",
            )
        return self
