"""How much CEL an API server understands."""

from enum import StrEnum


class CelLevel(StrEnum):
    """A level includes the ones before it."""

    NONE = "none"
    """Before 1.25: `x-kubernetes-validations` is an unknown field there, and is refused."""
    BASIC = "basic"
    """1.25 and newer."""
    QUANTITY = "quantity"
    """1.29 and newer, where CEL can compare quantities."""

    def includes(self, other: "CelLevel") -> bool:
        """Whether a rule of the other level may be used at this one."""
        order = list(CelLevel)
        return order.index(other) <= order.index(self)
