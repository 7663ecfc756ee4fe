"""The resource's definition, put into a cluster."""

from kubernetes import client

from epd_operator.crd.definition import custom_resource_definition
from epd_operator.crd.levels import CelLevel
from tests.support.waiting import eventually


def define(connection: client.ApiClient) -> None:
    """Makes the resource known, unless it is. Without CEL: the operator's own checks are what counts."""
    definition = custom_resource_definition(CelLevel.NONE)
    name = definition["metadata"]["name"]
    api = client.ApiextensionsV1Api(connection)
    if not any(one.metadata.name == name for one in api.list_custom_resource_definition().items):
        api.create_custom_resource_definition(definition)

    def established() -> bool:
        conditions = api.read_custom_resource_definition(name).status.conditions or []
        return any(one.type == "Established" and one.status == "True" for one in conditions)

    eventually(established)
