"""What the operator saw: written by it alone."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Part, Text, Word

Count = Annotated[int, Field(ge=0)]


class Condition(Part):
    """One aspect of the resource's state, as in all of Kubernetes."""

    type: Word
    """Ready, Progressing, Degraded, StoreReady, or a role's own such as EncoderReady."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Word
    """One word for programs."""
    message: Text = ""
    """A sentence for people."""
    observed_generation: Count | None = None
    """The generation of the spec that this is about."""
    last_transition_time: Word
    """When `status` last changed."""


class RoleStatus(Part):
    """Replicas of one role."""

    replicas: Count = 0
    """Replicas that exist."""
    ready_replicas: Count = 0
    """Replicas that are ready."""
    desired_replicas: Count = 0
    """Replicas that are wanted."""
    selector: Text = ""
    """Label selector of the role's pods."""


class RolesStatus(Part):
    """Replicas of each role."""

    encoder: RoleStatus | None = None
    """The encoders."""
    pd: RoleStatus | None = None
    """The PD instances."""
    prefill: RoleStatus | None = None
    """The prefill instances."""
    decode: RoleStatus | None = None
    """The decode instances."""


class StoreStatus(Part):
    """Usage of the EC store."""

    entries: Count | None = None
    """Entries in the store."""
    used_bytes: Count | None = None
    """Bytes they take."""
    capacity_bytes: Count | None = None
    """Bytes they may take."""


class Status(Part):
    """State of the resource."""

    observed_generation: Count | None = None
    """The generation of the spec that this is about."""
    conditions: list[Condition] = Field(default=[], max_length=32)
    """Ready, Progressing, Degraded, StoreReady and one for each role."""
    roles: RolesStatus | None = None
    """Replicas of each role."""
    endpoint: Text | None = None
    """The address that clients talk to."""
    store: StoreStatus | None = None
    """Usage of the EC store."""
