"""The whole custom resource definition."""

from typing import Any

from epd_operator.api.deployment import GROUP, KIND, VERSION, EPDDeployment

from .levels import CelLevel
from .rules import add_rules
from .schema import Schema, structural_schema

PLURAL = "epddeployments"
SINGULAR = "epddeployment"
NAME = f"{PLURAL}.{GROUP}"

# A priority above 0 shows a column with `-o wide` only.
_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether all of it serves.", 0),
    ("Model", "string", ".spec.model.source", "The model that is served.", 0),
    ("Encoder", "string", ".status.roles.encoder.summary", "Encoders: ready/wanted.", 0),
    ("PD", "string", ".status.roles.language", "PD instances, or prefill and decode: ready/wanted.", 0),
    ("Load", "string", ".status.roles.load", "How full the replicas of each role are.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since it was created.", 0),
    ("Endpoint", "string", ".status.endpoint", "The address that clients talk to.", 1),
    ("Store", "string", ".status.store.summary", "Bytes in the store, and how many it may take.", 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not.", 1),
)


def custom_resource_definition(cel: CelLevel = CelLevel.QUANTITY) -> dict[str, Any]:
    """The definition, with the CEL rules that an API server of this level understands."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": ["epd"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": resource_schema(cel)},
                }
            ],
        },
    }


def resource_schema(cel: CelLevel) -> Schema:
    """The schema of the resource, with the rules of a level."""
    schema = structural_schema(EPDDeployment)
    properties = schema["properties"]
    for standard in ("apiVersion", "kind"):
        # The API server knows these two by itself.
        properties[standard] = {"type": "string", "description": properties[standard]["description"]}
    # Of the metadata, a schema may say something about the name alone; even a description is refused.
    name = properties["metadata"]["properties"]["name"]
    properties["metadata"] = {"type": "object", "properties": {"name": name}}
    schema["required"] = ["spec"]
    add_rules(schema, cel)
    return schema


def _column(name: str, kind: str, path: str, description: str, priority: int) -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})
