"""Engines: command lines that the engine takes, probes that let it load, rollouts that can move."""

import argparse
import json
from typing import Any

import pytest
from pydantic import ValidationError

from epd_engine import cli as engine_cli
from epd_engine.ec_transfer.config import ECTransferConfig
from epd_operator.render import (
    SPEC_HASH_ANNOTATION,
    Images,
    RenderContext,
    RenderError,
    ServedVersions,
    render,
)

from .documents import encoder, find, flag, main_container, rendered, resource

GPU = {"limits": {"nvidia.com/gpu": 1}}


def model(**fields: Any) -> dict[str, Any]:
    return main_container(find(rendered({"model": fields}), "Deployment", "digits-pd"))


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def ec_config(container: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(flag(container, "--ec-transfer-config"))
    return config


def refusal(spec: dict[str, Any]) -> RenderError:
    with pytest.raises(RenderError) as caught:
        rendered(spec)
    return caught.value


@pytest.mark.parametrize("role", ["encoder", "pd"])
def test_the_engine_takes_the_command_line(role: str) -> None:
    roles = {"encoder": {"resources": GPU}, "pd": {"resources": GPU}}
    spec = {"model": {"source": "Qwen/Qwen2.5-VL-3B-Instruct", "revision": "main"}, "roles": roles}
    container = main_container(find(rendered(spec), "Deployment", f"digits-{role}"))
    parser = argparse.ArgumentParser()
    engine_cli._add_serve_arguments(parser)
    assert container["command"] == ["epd-engine"]
    assert container["args"][0] == "serve"
    arguments = parser.parse_args(container["args"][1:])
    assert (arguments.model, arguments.revision) == ("Qwen/Qwen2.5-VL-3B-Instruct", "main")
    assert (arguments.host, arguments.port, arguments.device) == ("0.0.0.0", 8000, "cuda")
    assert arguments.served_model_name == ["Qwen/Qwen2.5-VL-3B-Instruct"]


def test_both_ends_of_a_transfer_name_one_place() -> None:
    manifests = rendered()
    configs = [
        ec_config(main_container(find(manifests, "Deployment", f"digits-{role}")))
        for role in ("encoder", "pd")
    ]
    parsed = [ECTransferConfig.from_json(json.dumps(config)) for config in configs]
    assert [(one.is_encode_only, one.is_consumer) for one in parsed] == [(True, False), (False, True)]
    path = configs[0].pop("ec_connector_extra_config")["shared_storage_path"]
    assert path == configs[1].pop("ec_connector_extra_config")["shared_storage_path"]
    for role in ("encoder", "pd"):
        mounts = main_container(find(manifests, "Deployment", f"digits-{role}"))["volumeMounts"]
        assert {"name": "store", "mountPath": path} in mounts


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"source": "./models/digits-vl"}, "./models/digits-vl"),
        ({"source": "/opt/model"}, "/opt/model"),
        ({"source": "org/model"}, "org/model"),
        ({"source": "./qwen/3b", "claim": "models"}, "/models/qwen/3b"),
        ({"source": "/models/qwen", "claim": "models"}, "/models/qwen"),
    ],
)
def test_where_the_model_is(fields: dict[str, Any], source: str) -> None:
    assert model(**fields)["args"][1] == source


@pytest.mark.parametrize("source", ["org/model", "/opt/model", "../model", "./a/../../b", "/modelsx/a"])
def test_a_model_lies_in_its_claim(source: str) -> None:
    with pytest.raises(ValidationError, match="must be a path in it"):
        resource({"model": {"source": source, "claim": "models"}})


def test_a_model_claim_is_read_only() -> None:
    manifests = rendered({"model": {"source": "./m", "claim": "models"}})
    pod = find(manifests, "Deployment", "digits-encoder")["spec"]["template"]["spec"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod[
        "volumes"
    ]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in pod["containers"][0]["volumeMounts"]


def test_a_hub_token_stays_in_its_secret() -> None:
    env = env_of(model(source="org/model", tokenSecret={"name": "hub"}))
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize(("timeout", "seconds"), [("10m", 600), ("1s", 1), ("1500ms", 1.5), ("2h", 7200)])
def test_a_loading_model_is_not_killed_before_its_time(timeout: str, seconds: float) -> None:
    deployment = encoder(startupTimeout=timeout)
    probe = main_container(deployment)["startupProbe"]
    # The first of n probes comes at once, and the n-th failure ends the container.
    assert (
        seconds <= (probe["failureThreshold"] - 1) * probe["periodSeconds"] < seconds + probe["periodSeconds"]
    )
    assert deployment["spec"]["progressDeadlineSeconds"] > seconds


@pytest.mark.parametrize(("drain", "seconds"), [("30s", 30), ("0s", 0), ("1500ms", 1.5), ("10m", 600)])
def test_grace_is_longer_than_the_drain(drain: str, seconds: float) -> None:
    pod = encoder(drainTimeout=drain)["spec"]["template"]["spec"]
    before_sigterm = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before_sigterm + seconds + 5


@pytest.mark.parametrize(
    ("role", "surge", "unavailable"),
    [
        ({}, 1, 0),
        ({"resources": {"limits": {"cpu": 1, "hugepages-2Mi": "4Mi"}}}, 1, 0),
        ({"resources": GPU}, 0, 1),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, 1, 0),
        ({"podTemplate": {"spec": {"containers": [{"name": "engine", "resources": GPU}]}}}, 0, 1),
        ({"podTemplate": {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "a"}]}}}, 0, 1),
        ({"resources": GPU, "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}, 1, 0),
    ],
)
def test_a_rollout_waits_for_no_second_gpu(role: dict[str, Any], surge: int, unavailable: int) -> None:
    strategy = encoder(**role)["spec"]["strategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


@pytest.mark.parametrize(
    ("resources", "cuda"),
    [
        ({}, False),
        (GPU, True),
        ({"limits": {"amd.com/gpu": 1}}, True),
        ({"limits": {"example.com/nic": 1}}, False),
    ],
)
def test_the_engine_is_told_of_its_gpu(resources: dict[str, Any], cuda: bool) -> None:
    by_field = encoder(resources=resources)
    by_template = encoder(podTemplate={"spec": {"containers": [{"name": "engine", "resources": resources}]}})
    for deployment in (by_field, by_template):
        assert ("cuda" in main_container(deployment)["args"]) is cuda


@pytest.mark.parametrize(("cpu", "threads"), [("500m", "1"), ("1.5", "2"), (4, "4")])
def test_threads_are_as_many_as_processors(cpu: str | int, threads: str) -> None:
    assert env_of(main_container(encoder(resources={"requests": {"cpu": cpu}})))["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in env_of(main_container(encoder()))


def test_replicas_are_there_only_where_they_are_owned() -> None:
    assert "replicas" not in encoder()["spec"]
    assert encoder(replicas=0)["spec"]["replicas"] == 0
    assert "replicas" not in encoder(autoscaling={"maxReplicas": 2})["spec"]


def test_a_hash_follows_the_pods_of_its_role_alone() -> None:
    def hashes(spec: dict[str, Any]) -> tuple[str, str]:
        found = [find(rendered(spec), "Deployment", f"digits-{role}") for role in ("encoder", "pd")]
        one, other = (deployment["metadata"]["annotations"][SPEC_HASH_ANNOTATION] for deployment in found)
        return one, other

    before = hashes({})
    assert hashes({"roles": {"encoder": {"replicas": 3}, "pd": {}}}) == before
    assert hashes({"roles": {"encoder": {"strategy": {"type": "Recreate"}}, "pd": {}}}) == before
    changed = hashes({"roles": {"encoder": {"env": [{"name": "A", "value": "1"}]}, "pd": {}}})
    assert changed[0] != before[0]
    assert changed[1] == before[1]


def test_equal_amounts_restart_nothing() -> None:
    one, other = (encoder(resources={"limits": {"cpu": cpu}}) for cpu in ("0.2", "200m"))
    assert one == other


def test_dev_shm_counts_towards_the_memory_limit() -> None:
    limits = {"limits": {"memory": "1Gi"}}
    encoder(shmSize="512Mi", resources=limits)
    with pytest.raises(RenderError, match=r"spec\.roles\.encoder\.shmSize: counts towards"):
        encoder(shmSize="1024Mi", resources=limits)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"engine": {"type": "vllm"}}, "spec.engine.image"),
        (
            {
                "roles": {"encoder": {}, "prefill": {}, "decode": {}},
                "ecStore": {"sharedMemory": {}},
                "kvTransfer": {"type": "sharedStorage"},
            },
            "spec.kvTransfer.type",
        ),
    ],
)
def test_what_cannot_be_rendered_is_said(spec: dict[str, Any], path: str) -> None:
    error = refusal(spec)
    assert error.path == path
    assert error.message
    assert str(error) == f"{error.path}: {error.message}"


VLLM = {"type": "vllm", "image": "vllm:1"}
THREE = {"encoder": {}, "prefill": {}, "decode": {}}


def vllm_of(role: str, **spec: Any) -> dict[str, Any]:
    return main_container(find(rendered({"engine": VLLM, **spec}), "Deployment", f"digits-{role}"))


def test_vllm_runs_with_our_connector_and_the_janitor_is_ours() -> None:
    encoder, pd = vllm_of("encoder"), vllm_of("pd", roles={"encoder": {}, "pd": {"drainTimeout": "90s"}})
    assert (pd["image"], pd["command"], pd["args"][0]) == ("vllm:1", ["vllm"], "serve")
    assert flag(pd, "--shutdown-timeout") == "90"
    for name, reads in (("--enable-mm-embeds", True), ("--skip-mm-profiling", False)):
        assert (name in encoder["args"], name in pd["args"]) == (not reads, reads)
    configs = [ec_config(encoder), ec_config(pd)]
    assert [config.pop("ec_role") for config in configs] == ["ec_producer", "ec_consumer"]
    assert configs[0] == configs[1]
    assert configs[0]["ec_connector_module_path"] == "epd_engine.vllm.connector"
    assert configs[0]["ec_connector"] == "EPDStoreConnector"
    assert {probe["httpGet"]["path"] for name, probe in pd.items() if name.endswith("Probe")} == {"/health"}
    janitor = main_container(find(rendered({"engine": VLLM}), "Deployment", "digits-janitor"))
    assert janitor["image"] == "registry.example/epd-engine:0.1.0"


def test_vllm_keeps_the_nearer_tier_in_memory() -> None:
    config = ec_config(vllm_of("pd", ecStore={"sharedMemory": {}, "sharedStorage": {}}))
    assert config["ec_connector"] == "EPDTieredConnector"
    assert config["ec_connector_extra_config"].keys() == {"memory", "storage", "write"}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_vllm_hands_kv_over_at_its_pods_address(role: str, kv_role: str) -> None:
    container = vllm_of(role, roles=THREE)
    config = json.loads(flag(container, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", kv_role)
    assert "--enable-mm-embeds" in container["args"]
    env = env_of(container)
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    # Nobody else may reach that port.
    policy = find(rendered({"engine": VLLM, "roles": THREE}), "NetworkPolicy", "digits-engine")
    peers = policy["spec"]["ingress"][1]
    assert "ports" not in peers
    assert peers["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


def test_vllm_has_room_in_dev_shm() -> None:
    def shm(**role: Any) -> dict[str, Any]:
        deployment = find(
            rendered({"engine": VLLM, "roles": {"encoder": role, "pd": {}}}), "Deployment", "digits-encoder"
        )
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        found: dict[str, Any] = next(one for one in volumes if one["name"] == "shm")["emptyDir"]
        return found

    assert shm() == {"medium": "Memory"}
    assert shm(shmSize="2Gi") == {"medium": "Memory", "sizeLimit": "2Gi"}


def test_vllm_asks_no_hub_about_a_model_that_is_there() -> None:
    def offline(**source: str) -> bool:
        return "HF_HUB_OFFLINE" in env_of(vllm_of("pd", model=source))

    assert offline(source="./m", claim="models")
    assert not offline(source="org/model")


def test_the_charts_image_of_vllm_is_the_default() -> None:
    images = Images("engine:1", "proxy:1", "vllm:2")
    manifests = render(resource({"engine": {"type": "vllm"}}), RenderContext(ServedVersions(), images))
    assert main_container(find(manifests, "Deployment", "digits-pd"))["image"] == "vllm:2"


def test_images_pull_policy_and_secrets_are_the_charts() -> None:
    images = Images("engine@sha256:1", "proxy@sha256:2", None, "Never", ("one", "two"))
    manifests = render(resource(), RenderContext(ServedVersions(), images))
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in manifests
        if one["kind"] == "Deployment"
    }
    assert {name: pod["containers"][0]["image"] for name, pod in pods.items()} == {
        "digits-encoder": "engine@sha256:1",
        "digits-pd": "engine@sha256:1",
        "digits-proxy": "proxy@sha256:2",
        "digits-janitor": "engine@sha256:1",
    }
    for pod in pods.values():
        assert pod["containers"][0]["imagePullPolicy"] == "Never"
        assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
