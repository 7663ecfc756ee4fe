"""What each engine role does with the two transfers: the one place where roles differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .api import EPDDeployment, Role


@dataclass(frozen=True)
class RoleTraits:
    """A role's part in the transfers."""

    ec_role: Literal["ec_producer", "ec_consumer"] | None
    kv_role: Literal["kv_producer", "kv_consumer"] | None

    @property
    def reads_media(self) -> bool:
        """Whether requests name media by what an encoder said of them."""
        return self.ec_role != "ec_producer"


TRAITS = {
    "encoder": RoleTraits("ec_producer", None),
    "pd": RoleTraits("ec_consumer", None),
    "prefill": RoleTraits("ec_consumer", "kv_producer"),
    # What decode needs of a picture is in the KV that it takes.
    "decode": RoleTraits(None, "kv_consumer"),
}
"""By role, in the order in which roles are started."""


def roles_of(deployment: EPDDeployment) -> Iterator[tuple[str, Role]]:
    """The roles that the resource has, by name."""
    for name in TRAITS:
        role: Role | None = getattr(deployment.spec.roles, name)
        if role is not None:
            yield name, role
