"""What the chart renders, by real Helm and without a cluster."""

import functools
import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from epd_operator.crd.definition import custom_resource_definition
from epd_operator.crd.levels import CelLevel
from epd_operator.main import _parser
from epd_operator.metrics_adapter.options import adapter_options
from epd_operator.render.policies import OPERATOR_LABEL
from tests.integration.chart.programs import CHART, REPOSITORY, Helm, ProgramError

OLD, LOWEST, NEW = "1.20.2", "1.28.0", "1.31.0"
DIGEST = "sha256:" + "0123456789abcdef" * 4

EVERYTHING: dict[str, Any] = {
    "image": {
        "registry": "registry.example.com/team/",
        "tag": "1.2.3",
        "pullPolicy": "Always",
        "operator": {"digest": DIGEST},
        "engine": {"tag": "9"},
        "vllm": "registry.example.com/vllm:1",
        "pullSecrets": ["ours"],
    },
    "imagePullSecrets": [{"name": "pull"}],
    "replicas": 3,
    "scope": "namespace",
    "watchNamespaces": ["a", "b"],
    "logLevel": "debug",
    "extraArgs": ["--x=1"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "serviceAccount": {"annotations": {"a": "b"}},
    "metrics": {
        "port": 9090,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True},
    },
    "metricsAdapter": {"enabled": True, "apis": ["custom"], "extraArgs": ["--interval=2"]},
    "autoscaling": {"prometheusAddress": "http://prometheus.monitoring:9090"},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "x", "epd.dev/operator": "no", "app.kubernetes.io/instance": "never"},
    "priorityClassName": "high",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "podDisruptionBudget": {"maxUnavailable": "50%"},
}

# The definition is long, and the loader written in C is ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifests = dict[tuple[str, str], dict[str, Any]]


@functools.cache
def _rendered(helm: Helm, values: str, version: str) -> str:
    file = helm.home / "values.yaml"
    file.write_text(values)
    return helm("template", "epd", str(CHART), "-n", "epd-system", "--kube-version", version, "-f", str(file))


def render(helm: Helm, values: dict[str, Any] | None = None, version: str = NEW) -> Manifests:
    """The manifests, by kind and name (with the namespace where there are several of the name)."""
    manifests: Manifests = {}
    for manifest in yaml.load_all(_rendered(helm, json.dumps(values or {}), version), LOADER):
        metadata = manifest["metadata"]
        key = (manifest["kind"], metadata["name"])
        if key in manifests:
            key = (manifest["kind"], f"{metadata['namespace']}/{metadata['name']}")
        assert key not in manifests
        manifests[key] = manifest
    return manifests


def operator(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment", "epd-epd-operator"]["spec"]["template"]["spec"]
    return spec


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert chart["appVersion"] == version[1]


def test_lint_finds_nothing(offline_helm: Helm) -> None:
    assert "0 chart(s) failed" in offline_helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (OLD, CelLevel.NONE),
        ("1.25.0", CelLevel.BASIC),
        (LOWEST, CelLevel.BASIC),
        ("v1.29.3-eks-1234", CelLevel.QUANTITY),
        (NEW, CelLevel.QUANTITY),
    ],
)
def test_the_definition_has_the_rules_that_the_cluster_knows(
    offline_helm: Helm, version: str, level: CelLevel
) -> None:
    definition = render(offline_helm, version=version)["CustomResourceDefinition", "epddeployments.epd.dev"]
    assert definition["spec"] == custom_resource_definition(level)["spec"]
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_the_definition_may_be_left_to_others_or_not_be_kept(offline_helm: Helm) -> None:
    key = ("CustomResourceDefinition", "epddeployments.epd.dev")
    assert key not in render(offline_helm, {"crds": {"install": False}})
    assert "annotations" not in render(offline_helm, {"crds": {"keep": False}})[key]["metadata"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("version", ["1.28.0", kubernetes_validate.latest_version()])
def test_every_manifest_fits_kubernetes_own_schemas(
    offline_helm: Helm, values: dict[str, Any], version: str
) -> None:
    for (kind, name), manifest in render(offline_helm, values, version).items():
        if kind in ("ServiceMonitor", "PodMonitor"):
            continue
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{kind} {name}: {error.message} at {list(error.path)}")


def test_by_default_images_are_of_the_charts_version(offline_helm: Helm) -> None:
    container = operator(render(offline_helm))["containers"][0]
    assert container["image"] == "epd-operator:0.1.0"
    assert {"--engine-image=epd-engine:0.1.0", "--proxy-image=epd-proxy:0.1.0"} <= set(container["args"])


def test_a_digest_wins_over_tags_and_a_tag_of_ones_own_over_the_common_one(offline_helm: Helm) -> None:
    container = operator(render(offline_helm, EVERYTHING))["containers"][0]
    team = "registry.example.com/team"
    assert container["image"] == f"{team}/epd-operator@{DIGEST}"
    assert f"--engine-image={team}/epd-engine:9" in container["args"]
    assert f"--proxy-image={team}/epd-proxy:1.2.3" in container["args"]


def test_values_arrive_where_they_belong(offline_helm: Helm) -> None:
    manifests = render(offline_helm, EVERYTHING)
    pod = operator(manifests)
    container = pod["containers"][0]
    assert container["args"][-3:] == ["--namespace=a", "--namespace=b", "--x=1"]
    assert {"--log-level=debug", "--metrics-port=9090", "--image-pull-policy=Always"} <= set(
        container["args"]
    )
    assert {"--vllm-image=registry.example.com/vllm:1", "--image-pull-secret=ours"} <= set(container["args"])
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["priorityClassName"] == "high"
    deployment = manifests["Deployment", "epd-epd-operator"]["spec"]
    assert deployment["replicas"] == 3
    labels = deployment["template"]["metadata"]["labels"]
    assert labels["team"] == "x"
    assert labels[OPERATOR_LABEL] == "true", "by which janitors know the operator"
    assert deployment["selector"]["matchLabels"].items() <= labels.items(), (
        "the user cannot break the selector"
    )
    assert manifests["PodDisruptionBudget", "epd-epd-operator"]["spec"]["maxUnavailable"] == "50%"
    monitor = manifests["ServiceMonitor", "epd-epd-operator"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    service = manifests["Service", "epd-epd-operator"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_a_single_replica_has_no_disruption_budget(offline_helm: Helm) -> None:
    """It would do nothing, or keep a node from being drained."""
    assert not [kind for kind, _ in render(offline_helm) if kind == "PodDisruptionBudget"]


def test_an_older_cluster_gets_the_api_it_knows(offline_helm: Helm) -> None:
    budget = render(offline_helm, {"replicas": 2}, OLD)["PodDisruptionBudget", "epd-epd-operator"]
    assert budget["apiVersion"] == "policy/v1beta1"


def test_pods_are_restricted(offline_helm: Helm) -> None:
    manifests = render(offline_helm)
    for pod in (operator(manifests), manifests["Pod", "epd-epd-operator-test"]["spec"]):
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
        assert container["resources"]["limits"]["memory"]


def test_the_test_pod_asks_the_operators_service_in_valid_python(offline_helm: Helm) -> None:
    manifests = render(offline_helm)
    pod = manifests["Pod", "epd-epd-operator-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (source,) = pod["spec"]["containers"][0]["args"]
    compile(source, "test", "exec")
    assert '"http://epd-epd-operator.epd-system:"' in source
    selector = manifests["Service", "epd-epd-operator"]["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "it must not answer in its place"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_operator_understands_its_command_line(offline_helm: Helm, values: dict[str, Any]) -> None:
    container = operator(render(offline_helm, values | {"extraArgs": []}))["containers"][0]
    assert container["command"] == ["epd-operator"]
    given = _parser().parse_args(container["args"])
    assert given.leader_election
    assert given.namespaces == values.get("watchNamespaces", [])


def adapter(manifests: Manifests) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Deployment", "epd-epd-operator-metrics-adapter"]["spec"]
    return spec


def test_the_metrics_adapter_is_there_when_it_is_wanted(offline_helm: Helm) -> None:
    assert not [name for _, name in render(offline_helm) if "metrics-adapter" in name]
    manifests = render(offline_helm, {"metricsAdapter": {"enabled": True}})
    services = {name for kind, name in manifests if kind == "APIService"}
    assert services == {
        "v1beta1.custom.metrics.k8s.io",
        "v1beta2.custom.metrics.k8s.io",
        "v1beta1.external.metrics.k8s.io",
    }
    template = adapter(manifests)["template"]
    labels = template["metadata"]["labels"]
    assert labels[OPERATOR_LABEL] == "true", "by which engines let it in"
    assert (
        manifests["Service", "epd-epd-operator-metrics-adapter"]["spec"]["selector"].items() <= labels.items()
    )
    assert not manifests["Service", "epd-epd-operator"]["spec"]["selector"].items() <= labels.items()
    assert template["spec"]["securityContext"] == operator(manifests)["securityContext"]


def test_another_server_of_the_metrics_apis_keeps_what_it_has(offline_helm: Helm) -> None:
    manifests = render(offline_helm, EVERYTHING)
    assert not [name for kind, name in manifests if kind == "APIService" and "external" in name]
    (rule,) = [
        rule
        for rule in manifests["ClusterRole", "epd-epd-operator-metrics-adapter"]["rules"]
        if rule["resources"] == ["apiservices"]
    ]
    assert rule["resourceNames"] == ["v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io"]


@pytest.mark.parametrize("values", [{"metricsAdapter": {"enabled": True}}, EVERYTHING], ids=["all", "some"])
def test_the_metrics_adapter_understands_its_command_line(
    offline_helm: Helm, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = adapter(render(offline_helm, values))["template"]["spec"]["containers"]
    monkeypatch.setenv("POD_NAMESPACE", "epd-system")
    options = adapter_options(_parser().parse_args(container["args"]))
    apis = values["metricsAdapter"].get("apis", ["custom", "external"])
    assert options.groups == tuple(f"{one}.metrics.k8s.io" for one in apis)
    assert list(options.namespaces) == values.get("watchNamespaces", [])
    assert options.service == options.secret == "epd-epd-operator-metrics-adapter"
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "https": options.port,
        "metrics": options.metrics_port,
        "health": options.health_port,
    }


def test_namespace_scope_has_no_rights_elsewhere(offline_helm: Helm) -> None:
    manifests = render(offline_helm, {"scope": "namespace", "rbac": {"aggregate": False}})
    assert not [kind for kind, _ in manifests if kind.startswith("ClusterRole")]
    assert {m["metadata"]["namespace"] for (kind, _), m in manifests.items() if kind == "RoleBinding"} == {
        "epd-system"
    }
    assert "--namespace=epd-system" in operator(manifests)["containers"][0]["args"]


def test_wrong_values_are_refused_by_name(offline_helm: Helm) -> None:
    wrong = {
        "replica": "replica=2",
        "replicas": "replicas=-1",
        "scope": "scope=galaxy",
        "logLevel": "logLevel=loud",
        "image.operator.digest": "image.operator.digest=abc",
        "image.proxy.repository": "image.proxy.repository=epd:1",
        "metrics.port": "metrics.port=80",
        "crds.keep": "crds.keep=perhaps",
        "request": "resources.request.cpu=1",
        "watchNamespaces.0": "watchNamespaces={A_b}",
    }
    settings = [word for setting in wrong.values() for word in ("--set", setting)]
    with pytest.raises(ProgramError) as refused:
        offline_helm("template", "epd", str(CHART), *settings)
    # Helm 3 names a field by dots, Helm 4 by slashes.
    said = str(refused.value).replace("/", ".")
    assert [name for name in wrong if name not in said] == []


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
