"""What runs as pods (or, under `epd up`, as processes): the roles and the proxy."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from .base import (
    Annotations,
    Duration,
    FreeObject,
    Labels,
    ObjectName,
    Part,
    Quantity,
    Text,
    Word,
    duration_seconds,
    list_map_by,
)
from .scaling import Autoscaling


class EnvVar(Part):
    """One environment variable."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[^=]+$")]
    """The variable's name."""
    value: Text | None = None
    """Its value; text, so numbers go in quotes."""
    value_from: FreeObject | None = None
    """A source for the value, as in a pod (pods only)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise PydanticCustomError("env", "takes `value` or `valueFrom`, not both")
        return self


class Resources(Part):
    """Compute resources of one replica, as in a pod's container."""

    requests: dict[Word, Quantity] = Field(default={}, max_length=32)
    """What a replica is sure to get."""
    limits: dict[Word, Quantity] = Field(default={}, max_length=32)
    """What a replica may use at most, GPUs included."""


class PodMetadata(Part):
    """Labels and annotations of the pods."""

    labels: Labels = Field(default={})
    """Labels that are added."""
    annotations: Annotations = Field(default={})
    """Annotations that are added."""


class PodTemplate(Part):
    """Merged by name into the pods that the operator makes; what is given here wins."""

    metadata: PodMetadata | None = None
    """Labels and annotations of the pods."""
    spec: FreeObject | None = None
    """Any part of a pod's spec."""


class RollingUpdate(Part):
    """How many replicas may be more or fewer while they are replaced."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] = 0
    """Replicas above the wanted number."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas below the wanted number."""

    @model_validator(mode="after")
    def _can_move(self) -> Self:
        if self.max_surge == 0 and self.max_unavailable == 0:
            raise PydanticCustomError(
                "rollout", "maxSurge and maxUnavailable must not both be 0: no replica could be replaced"
            )
        return self


class Strategy(Part):
    """How changed pods replace the old ones."""

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """One after another, or all at once."""
    rolling_update: RollingUpdate | None = None
    """Limits of a rolling update."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if self.type == "Recreate" and self.rolling_update is not None:
            raise PydanticCustomError("strategy", "`rollingUpdate` has no meaning with type Recreate")
        return self


class Instance(Part):
    """One command, however often it runs."""

    resources: Resources | None = None
    """Compute resources of one replica (pods only)."""
    startup_timeout: Duration = "10m"
    """How long a replica may take until it is ready."""
    drain_timeout: Duration = "30s"
    """How long a replica that is told to end may finish what it has begun."""
    pod_template: PodTemplate | None = None
    """Changes to the pods (pods only)."""
    extra_args: list[Text] = Field(default=[], max_length=64)
    """Arguments appended to the command line; they win over those before them."""
    env: list[EnvVar] = Field(default=[], max_length=128, json_schema_extra=list_map_by("name"))
    """Environment variables; they win over those set for the role."""

    @property
    def drain_seconds(self) -> int:
        """`drain_timeout` in whole seconds, as command lines and pods take it."""
        return math.ceil(duration_seconds(self.drain_timeout))

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [variable.name for variable in self.env]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PydanticCustomError(
                "env", "`env` names {names} more than once", {"names": ", ".join(twice)}
            )
        return self


class Workload(Instance):
    """Replicas of one command."""

    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many run. Absent: not owned by this resource, so `kubectl scale` or an autoscaler may set it
    (`epd up` runs one)."""
    strategy: Strategy | None = None
    """How changed pods replace the old ones (pods only)."""


class Role(Workload):
    """One role of the engine."""

    autoscaling: Autoscaling | None = None
    """Scale the role by load; in place of `replicas`."""
    shm_size: Quantity | None = None
    """Size of /dev/shm (pods only)."""

    @model_validator(mode="after")
    def _one_owner_of_replicas(self) -> Self:
        if self.replicas is not None and self.autoscaling is not None:
            raise PydanticCustomError(
                "replicas", "takes `replicas` or `autoscaling`, not both: remove `replicas` to scale by load"
            )
        return self


class Proxy(Workload):
    """The one address that clients talk to."""

    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The port that clients reach it at: of its Service, or of this machine under `epd up`."""
    api_keys_secret: ObjectName | None = None
    """Secret whose key `keys.json` holds hashed API keys; without it every client is served (pods only)."""


class Roles(Part):
    """The roles: an encoder, and `pd`, or `prefill` and `decode`."""

    encoder: Role
    """Encodes pictures and other media; loads no language model. All defaults: `encoder: {}`."""
    pd: Role | None = None
    """Prefill and decode in one process. All defaults: `pd: {}`."""
    prefill: Role | None = None
    """Prefill only; hands its KV to `decode`."""
    decode: Role | None = None
    """Decode only; takes its KV from `prefill`."""

    @model_validator(mode="after")
    def _one_topology(self) -> Self:
        split = [self.prefill is not None, self.decode is not None]
        if self.pd is not None and any(split):
            raise PydanticCustomError("roles", "takes `pd`, or `prefill` and `decode`, not both")
        if self.pd is None and not all(split):
            raise PydanticCustomError(
                "roles", "needs `pd`, or `prefill` and `decode` (one with all defaults is written `pd: {{}}`)"
            )
        return self

    @model_validator(mode="after")
    def _encoders_alone_sleep(self) -> Self:
        for role in (self.pd, self.prefill, self.decode):
            if role is not None and role.autoscaling is not None and role.autoscaling.min_replicas == 0:
                raise PydanticCustomError(
                    "sleep",
                    "minReplicas 0 is for encoders: without pd, prefill or decode nothing is answered",
                )
        return self
