"""What a status is made of: the state of each part of a deployment."""

from dataclasses import dataclass
from typing import Any

from ..api.status import RoleStatus

Object = dict[str, Any]
"""A Kubernetes object as the API server gives it."""


@dataclass(frozen=True)
class Problem:
    """Something that somebody must act on."""

    reason: str
    """One word for programs."""
    message: str
    """What is wrong, in the words of whoever found it."""


@dataclass(frozen=True)
class PartState:
    """The state of one part: a role, the proxy, or the store."""

    ready: bool
    reason: str
    message: str
    is_problem: bool = False
    """Whether it waits for somebody to act, not just for time to pass."""
    counts: RoleStatus | None = None
    """Replicas; None for the store."""

    @property
    def in_progress(self) -> bool:
        """Whether it will be ready if nothing goes wrong."""
        return not self.ready and not self.is_problem and self.reason != SCALED_TO_ZERO


SCALED_TO_ZERO = "ScaledToZero"


def waiting(reason: str, message: str, counts: RoleStatus | None = None) -> PartState:
    """A part that needs time."""
    return PartState(False, reason, message, counts=counts)


def blocked(problem: Problem, counts: RoleStatus | None = None) -> PartState:
    """A part that needs somebody."""
    return PartState(False, problem.reason, problem.message, is_problem=True, counts=counts)
