"""The proxy, the store's claims, policies and autoscalers, beyond what the golden files show."""

import json
from typing import Any

import pytest

from epd_operator.api import EPDDeployment
from epd_operator.render import RenderContext, ServedVersions, endpoint, render
from epd_proxy import cli as proxy_cli

from .documents import CONTEXT, IMAGES, find, flag, main_container, rendered, resource

MEMORY = {"sharedMemory": {"claimTemplate": {"size": "1Gi"}, "capacity": "512Mi"}}


def kinds(manifests: list[dict[str, Any]], kind: str) -> list[str]:
    return [one["metadata"]["name"] for one in manifests if one["kind"] == kind]


def test_the_proxy_may_read_endpoint_slices_and_nothing_else() -> None:
    manifests = rendered()
    (role,) = (one for one in manifests if one["kind"] == "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    binding = find(manifests, "RoleBinding", "digits-proxy")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = find(manifests, "Deployment", "digits-proxy")["spec"]["template"]["spec"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "serving"}
    ]


def test_the_proxy_takes_the_command_line() -> None:
    container = main_container(
        find(rendered({"proxy": {"drainTimeout": "1m"}}), "Deployment", "digits-proxy")
    )
    assert container["command"] == ["epd-proxy"]
    config = proxy_cli.parse(container["args"])
    assert (config.host, config.port, config.limits.drain) == ("0.0.0.0", 8000, 60)


def test_the_port_of_the_proxy_is_its_services() -> None:
    manifests = rendered({"proxy": {"port": 80}})
    (port,) = find(manifests, "Service", "digits-proxy")["spec"]["ports"]
    container = main_container(find(manifests, "Deployment", "digits-proxy"))
    assert (port["port"], flag(container, "--port")) == (80, "8000")
    assert endpoint(resource({"proxy": {"port": 80}})) == "http://digits-proxy.serving.svc:80"


def test_without_a_secret_no_keys_are_looked_for() -> None:
    container = main_container(find(rendered(), "Deployment", "digits-proxy"))
    assert "--api-keys-file" not in container["args"]


def test_a_missing_secret_keeps_the_proxy_from_starting() -> None:
    manifests = rendered({"proxy": {"apiKeysSecret": "keys"}})
    pod = find(manifests, "Deployment", "digits-proxy")["spec"]["template"]["spec"]
    assert {"name": "api-keys", "secret": {"secretName": "keys", "defaultMode": 0o440}} in pod["volumes"]


def test_engine_services_list_ready_pods_by_address() -> None:
    spec = find(rendered(), "Service", "digits-encoder")["spec"]
    assert spec["clusterIP"] == "None"
    assert not spec.get("publishNotReadyAddresses", False)


def test_a_resource_without_a_uid_has_children_without_owners() -> None:
    document = resource().model_dump(by_alias=True, exclude_none=True)
    del document["metadata"]["uid"], document["metadata"]["namespace"]
    for one in render(EPDDeployment.model_validate(document), CONTEXT):
        assert "ownerReferences" not in one["metadata"]
        assert one["metadata"]["namespace"] == "default"


@pytest.mark.parametrize(
    ("store", "claims"),
    [
        ({"sharedStorage": {}}, ["digits-store"]),
        ({"sharedStorage": {"existingClaim": "mine"}}, []),
        ({"sharedMemory": {}}, ["digits-store-memory"]),
        ({"sharedMemory": {"existingClaim": "mine"}}, []),
    ],
)
def test_claims_that_are_made(store: dict[str, Any], claims: list[str]) -> None:
    assert kinds(rendered({"ecStore": store}), "PersistentVolumeClaim") == claims


def test_decode_is_free_to_go_to_another_node_than_the_store() -> None:
    roles = {"encoder": {}, "prefill": {}, "decode": {}}
    manifests = rendered({"roles": roles, "ecStore": MEMORY})
    affine = {
        role: "affinity" in find(manifests, "Deployment", f"digits-{role}")["spec"]["template"]["spec"]
        for role in roles
    }
    assert affine == {"encoder": True, "prefill": True, "decode": False}
    assert '"capacity": 536870912' in flag(
        main_container(find(manifests, "Deployment", "digits-encoder")), "--ec-transfer-config"
    )


def janitor(store: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return main_container(find(rendered({"ecStore": store, **spec}), "Deployment", "digits-janitor"))


@pytest.mark.parametrize(
    ("store", "arguments"),
    [
        ({"sharedStorage": {}}, ["--path", "/var/lib/epd/store", "--capacity", "9663676416"]),
        (
            {"sharedStorage": {"capacity": "1Gi", "ttl": "1h30m"}},
            ["--path", "/var/lib/epd/store", "--capacity", "1073741824", "--ttl", "5400"],
        ),
        ({"sharedStorage": {"existingClaim": "mine"}}, ["--path", "/var/lib/epd/store"]),
        (MEMORY, ["--memory-path", "/var/lib/epd/memory"]),
        (
            {"sharedStorage": {"existingClaim": "mine", "ttl": "1500ms"}, **MEMORY},
            ["--path", "/var/lib/epd/store", "--ttl", "1.5", "--memory-path", "/var/lib/epd/memory"],
        ),
    ],
)
def test_the_janitor_is_told_of_the_tiers_there_are(store: dict[str, Any], arguments: list[str]) -> None:
    container = janitor(store)
    assert container["command"] == ["epd-engine"]
    assert container["args"] == ["store", "janitor", *arguments, "--host", "0.0.0.0", "--port", "8000"]


def test_the_janitor_has_the_engines_image_and_resources_of_its_own() -> None:
    engine = {"engine": {"image": "mine:1"}}
    assert janitor({"sharedStorage": {}}, **engine)["image"] == "mine:1"
    assert janitor({"sharedStorage": {}})["resources"]["limits"] == {"memory": "512Mi"}
    given = {"limits": {"memory": "2Gi"}}
    assert janitor({"sharedStorage": {}, "janitor": {"resources": given}})["resources"] == given


@pytest.mark.parametrize(("write", "told"), [(None, "through"), ("through", "through"), ("back", "back")])
def test_two_tiers_are_one_connector_of_two(write: str | None, told: str) -> None:
    store = {"sharedStorage": {}, **MEMORY, **({"write": write} if write else {})}
    manifests = rendered({"ecStore": store})
    for role in ("encoder", "pd"):
        container = main_container(find(manifests, "Deployment", f"digits-{role}"))
        config = json.loads(flag(container, "--ec-transfer-config"))
        assert config["ec_connector"] == "ECTieredConnector"
        assert config["ec_connector_extra_config"] == {
            "memory": {"path": "/var/lib/epd/memory", "capacity": 2**29, "lease_seconds": 60.0},
            "storage": {"shared_storage_path": "/var/lib/epd/store"},
            "write": told,
        }


def test_outside_a_cluster_operators_of_any_namespace_reach_the_janitor() -> None:
    manifests = render(resource(), RenderContext(ServedVersions(), IMAGES))
    policy = find(manifests, "NetworkPolicy", "digits-janitor")
    assert policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"] == {}


def test_prefill_and_decode_are_what_the_proxy_is_told_of() -> None:
    manifests = rendered({"roles": {"encoder": {}, "prefill": {}, "decode": {}}})
    container = main_container(find(manifests, "Deployment", "digits-proxy"))
    config = proxy_cli.parse(container["args"])
    assert config.services is not None
    assert config.services.names == {role: f"digits-{role}" for role in ("encoder", "prefill", "decode")}
    assert {"digits-prefill", "digits-decode"} <= set(kinds(manifests, "PodDisruptionBudget"))


@pytest.mark.parametrize(
    ("spec", "connector"),
    [
        ({}, "SharedStorageKVConnector"),
        ({"kvTransfer": {}}, "SharedStorageKVConnector"),
        ({"ecStore": {"sharedStorage": {}, "sharedMemory": {}}}, "SharedStorageKVConnector"),
        ({"ecStore": {"sharedMemory": {}}}, "NixlKVConnector"),
        ({"kvTransfer": {"type": "nixl"}}, "NixlKVConnector"),
    ],
)
def test_kv_crosses_as_files_where_there_is_a_volume_for_them(spec: dict[str, Any], connector: str) -> None:
    roles = {"encoder": {}, "prefill": {}, "decode": {}}
    manifests = rendered({"roles": roles, **spec})
    told = [
        json.loads(
            flag(main_container(find(manifests, "Deployment", f"digits-{role}")), "--kv-transfer-config")
        )
        for role in ("prefill", "decode")
    ]
    assert [one["kv_connector"] for one in told] == [connector] * 2
    assert [one["kv_role"] for one in told] == ["kv_producer", "kv_consumer"]


def test_nixl_alone_opens_the_way_between_engines() -> None:
    roles = {"encoder": {}, "prefill": {}, "decode": {}}
    ways = {
        kind: len(
            find(rendered({"roles": roles, "kvTransfer": {"type": kind}}), "NetworkPolicy", "digits-engine")[
                "spec"
            ]["ingress"]
        )
        for kind in ("nixl", "sharedStorage")
    }
    assert ways == {"nixl": 2, "sharedStorage": 1}


def test_an_autoscaler_comes_and_goes_with_its_field() -> None:
    assert kinds(rendered(), "HorizontalPodAutoscaler") == []
    roles = {"encoder": {"autoscaling": {"maxReplicas": 3}}, "pd": {"replicas": 1}}
    assert kinds(rendered({"roles": roles}), "HorizontalPodAutoscaler") == ["digits-encoder"]


def test_versions_are_those_that_are_served() -> None:
    roles = {"encoder": {"autoscaling": {"maxReplicas": 3}}, "pd": {}}
    versions = ServedVersions("autoscaling/v2beta2", "policy/v1beta1", "discovery.k8s.io/v1beta1")
    manifests = render(resource({"roles": roles}), RenderContext(versions, IMAGES))
    found = {one["kind"]: one["apiVersion"] for one in manifests}
    assert found["HorizontalPodAutoscaler"] == "autoscaling/v2beta2"
    assert found["PodDisruptionBudget"] == "policy/v1beta1"
