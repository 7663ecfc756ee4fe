"""What each engine role does with the two transfers: the one place where roles differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..api import EPDDeployment, Role
from ..wire import CONSUMER, PRODUCER


@dataclass(frozen=True)
class RoleTraits:
    """A role's part in the transfers."""

    ec_role: str | None
    kv_role: Literal["kv_producer", "kv_consumer"] | None


TRAITS = {
    "encoder": RoleTraits(PRODUCER, None),
    "pd": RoleTraits(CONSUMER, None),
    "prefill": RoleTraits(CONSUMER, "kv_producer"),
    # What decode needs of a picture is in the KV that it takes.
    "decode": RoleTraits(None, "kv_consumer"),
}
"""By role, in the order in which roles are rendered."""


def roles_of(deployment: EPDDeployment) -> Iterator[tuple[str, Role]]:
    """The roles that the resource has, by name."""
    for name in TRAITS:
        role: Role | None = getattr(deployment.spec.roles, name)
        if role is not None:
            yield name, role
