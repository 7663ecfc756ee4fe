"""What the operator saw: written by it alone."""

from typing import Annotated, Literal

from pydantic import Field

from .base import Part, Text, Timestamp, Word, list_map_by

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
    last_transition_time: Timestamp
    """When `status` last changed."""


class RoleStatus(Part):
    """Replicas of one role."""

    replicas: Count = 0
    """Replicas that exist."""
    ready_replicas: Count = 0
    """Replicas that are ready."""
    desired_replicas: Count = 0
    """Replicas that are wanted."""
    summary: Word | None = None
    """Ready and wanted replicas for `kubectl get`: `1/2`."""
    load: Count | None = None
    """How full they are, in percent; absent where they do not say."""
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
    language: Word | None = None
    """Ready and wanted replicas of what runs the language model, for `kubectl get`: `1/2` for PD,
    `P 1/1 D 0/2` for prefill and decode."""
    load: Word | None = None
    """How full each role is, for `kubectl get`: `E 85% PD 40%`."""


class StoreStatus(Part):
    """Usage of the EC store."""

    entries: Count | None = None
    """Entries in the store."""
    used_bytes: Count | None = None
    """Bytes they take."""
    capacity_bytes: Count | None = None
    """Bytes they may take."""
    summary: Word | None = None
    """Bytes taken and allowed for `kubectl get`: `1.2Gi/9.0Gi`."""


class Status(Part):
    """State of the resource."""

    observed_generation: Count | None = None
    """The generation of the spec that this is about."""
    conditions: list[Condition] = Field(default=[], max_length=32, json_schema_extra=list_map_by("type"))
    """Ready, Progressing, Degraded, StoreReady and one for each role."""
    roles: RolesStatus | None = None
    """Replicas of each role."""
    endpoint: Text | None = None
    """The address that clients talk to."""
    store: StoreStatus | None = None
    """Usage of the EC store."""


def store_summary_of(used: int, capacity: int | None) -> str:
    """A store's `summary`."""
    return _size(used) if capacity is None else f"{_size(used)}/{_size(capacity)}"


def _size(count: int) -> str:
    amount, units = float(count), ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.1f}{units[0]}" if units[0] else str(count)


def summary_of(ready: int, desired: int) -> str:
    """A role's `summary`."""
    return f"{ready}/{desired}"


def language_of(pd: RoleStatus | None, prefill: RoleStatus | None, decode: RoleStatus | None) -> str | None:
    """The roles' `language`; None where no such role is known yet.

    A printer column shows one field and cannot choose, so what it shows is put together here.
    """
    if pd is not None:
        return summary_of(pd.ready_replicas, pd.desired_replicas)
    parts = [
        f"{letter} {summary_of(role.ready_replicas, role.desired_replicas)}"
        for letter, role in (("P", prefill), ("D", decode))
        if role is not None
    ]
    return " ".join(parts) or None
