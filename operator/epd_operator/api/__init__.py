"""The typed spec and status of `EPDDeployment`, and reading it from a document.

Everything that this project knows about the resource's shape is here: the command line checks
documents with it, and the custom resource definition is generated from it.
"""

from .base import duration_seconds, quantity_value
from .deployment import EPDDeployment, Model, Spec
from .document import DocumentError, Problem, parse_document
from .workload import Instance, Role, Roles, Workload

__all__ = [
    "DocumentError",
    "EPDDeployment",
    "Instance",
    "Model",
    "Problem",
    "Role",
    "Roles",
    "Spec",
    "Workload",
    "duration_seconds",
    "parse_document",
    "quantity_value",
]
