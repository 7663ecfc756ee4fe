"""What must hold between manifests, and of every pod: a schema cannot say it."""

from collections.abc import Iterator
from typing import Any

import pytest

from epd_operator.api import parse_document
from epd_operator.render import endpoint

from .documents import CASES, document_of, find, main_container, render_case

Manifests = list[dict[str, Any]]
COMPONENT = "app.kubernetes.io/component"
UID = "5c1de8f0-6f0e-4f5c-9a53-0d1c5a1c7a01"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(case: str) -> Manifests:
    return render_case(case)


def of_kind(manifests: Manifests, kind: str) -> Iterator[dict[str, Any]]:
    return (one for one in manifests if one["kind"] == kind)


def pods(manifests: Manifests) -> Iterator[dict[str, Any]]:
    return (one["spec"]["template"] for one in of_kind(manifests, "Deployment"))


def test_no_two_children_share_a_name(manifests: Manifests) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)


def test_children_are_labelled_and_owned(case: str, manifests: Manifests) -> None:
    name = parse_document(document_of(case)).metadata.name
    for one in manifests:
        metadata = one["metadata"]
        assert metadata["namespace"] == "serving"
        assert metadata["labels"]["app.kubernetes.io/name"] == "epd"
        assert metadata["labels"]["app.kubernetes.io/instance"] == name
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "epd-operator"
        assert metadata["labels"]["app.kubernetes.io/component"]
        if (case, one["kind"]) == ("retained-claim", "PersistentVolumeClaim"):
            assert "ownerReferences" not in metadata
        else:
            assert metadata["ownerReferences"] == [
                {
                    "apiVersion": "epd.dev/v1alpha1",
                    "kind": "EPDDeployment",
                    "name": name,
                    "uid": UID,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ]


def test_each_selector_selects_one_kind_of_pods(manifests: Manifests) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(manifests)]
    selectors = [one["spec"]["selector"] for one in of_kind(manifests, "Service")]
    selectors += [
        one["spec"]["selector"]["matchLabels"]
        for kind in ("Deployment", "PodDisruptionBudget")
        for one in of_kind(manifests, kind)
    ]
    # The janitor has neither a Service nor a budget.
    assert len(selectors) == 3 * len(labels) - 2
    for selector in selectors:
        assert set(selector) == {"app.kubernetes.io/instance", "app.kubernetes.io/component"}
        assert len([one for one in labels if selector.items() <= one.items()]) == 1


def test_the_proxy_and_who_asks_for_metrics_reach_the_engines(manifests: Manifests) -> None:
    engines, _, _ = of_kind(manifests, "NetworkPolicy")
    (component,) = engines["spec"]["podSelector"]["matchExpressions"]
    labels = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods(manifests)]
    assert component["values"] == [one for one in labels if one not in ("proxy", "janitor")]
    ours, operators, collectors = engines["spec"]["ingress"][0]["from"]
    assert operators["podSelector"] == {"matchLabels": {"epd.dev/operator": "true"}}
    assert operators["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "epd-system"}}
    assert collectors == {"namespaceSelector": {"matchLabels": {"epd.dev/metrics": "true"}}}
    proxies = ours["podSelector"]["matchLabels"]
    assert proxies["app.kubernetes.io/component"] == "proxy"
    assert "app.kubernetes.io/instance" in proxies


def test_there_is_one_janitor_and_the_operator_alone_reaches_it(manifests: Manifests) -> None:
    (janitor,) = (
        one for one in of_kind(manifests, "Deployment") if one["metadata"]["name"].endswith("-janitor")
    )
    assert janitor["spec"]["replicas"] == 1
    assert janitor["spec"]["strategy"] == {"type": "Recreate"}
    labels = janitor["spec"]["template"]["metadata"]["labels"]
    (policy,) = (
        one
        for one in of_kind(manifests, "NetworkPolicy")
        if one["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
        and one["metadata"]["name"].endswith("-janitor")
    )
    ((operators, collectors),) = (rule["from"] for rule in policy["spec"]["ingress"])
    assert operators["podSelector"] == {"matchLabels": {"epd.dev/operator": "true"}}
    assert operators["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "epd-system"}}
    assert collectors == {"namespaceSelector": {"matchLabels": {"epd.dev/metrics": "true"}}}


def test_the_janitor_mounts_what_the_encoder_does_and_shares_its_node(manifests: Manifests) -> None:
    janitor, encoder = (
        next(pod for pod in pods(manifests) if pod["metadata"]["labels"][COMPONENT] == name)
        for name in ("janitor", "encoder")
    )

    def claims(pod: dict[str, Any]) -> list[Any]:
        stores = [one for one in pod["spec"]["volumes"] if one["name"].startswith("store")]
        mounts = [one for one in pod["spec"]["containers"][0]["volumeMounts"] if "epd" in one["mountPath"]]
        return [*stores, *mounts]

    assert claims(janitor)
    assert claims(janitor) == claims(encoder)
    assert janitor["spec"].get("affinity") == encoder["spec"].get("affinity")
    if "affinity" in janitor["spec"]:
        (term,) = janitor["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (expression,) = term["labelSelector"]["matchExpressions"]
        # The first pod may go anywhere only where it is itself among those that are sought.
        assert {"encoder", "janitor"} <= set(expression["values"])


def test_pods_keep_to_the_restricted_standard(manifests: Manifests) -> None:
    for pod in pods(manifests):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        container = pod["spec"]["containers"][0]["securityContext"]
        assert container == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }


def test_mounts_have_their_volumes_and_home_is_writable(manifests: Manifests) -> None:
    for pod in pods(manifests):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert len(volumes) == len(pod["spec"]["volumes"])
        container = pod["spec"]["containers"][0]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert len(set(mounts)) == len(mounts)
        home = next(one["value"] for one in container["env"] if one["name"] == "HOME")
        assert any(f"{home}/".startswith(f"{mount}/") for mount in mounts)


def test_claims_that_are_mounted_are_made_or_the_users(case: str, manifests: Manifests) -> None:
    made = {one["metadata"]["name"] for one in of_kind(manifests, "PersistentVolumeClaim")}
    mounted = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods(manifests)
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    users = {
        "existing-claim": {"team-store"},
        "two-tiers": {"team-store", "team-memory"},
        "retained-claim": {"team-models"},
        "hub-model": {"hub-cache"},
        "vllm": {"models"},
        "vllm-prefill-decode": {"models"},
    }
    assert mounted == made | users.get(case, set())


def test_accounts_exist_and_only_the_proxy_has_a_token(manifests: Manifests) -> None:
    accounts = {one["metadata"]["name"] for one in of_kind(manifests, "ServiceAccount")}
    for pod in pods(manifests):
        assert pod["spec"]["serviceAccountName"] in accounts
        is_proxy = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "proxy"
        assert pod["spec"]["automountServiceAccountToken"] is is_proxy


def test_replicas_have_one_owner(manifests: Manifests) -> None:
    deployments = {one["metadata"]["name"]: one for one in of_kind(manifests, "Deployment")}
    for one in of_kind(manifests, "HorizontalPodAutoscaler"):
        assert "replicas" not in deployments[one["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_a_pod_may_take_longer_to_end_than_it_drains(manifests: Manifests) -> None:
    for pod in pods(manifests):
        stop = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["spec"]["terminationGracePeriodSeconds"] > int(stop[-1])


def test_the_endpoint_is_the_proxys_service(case: str, manifests: Manifests) -> None:
    deployment = parse_document(document_of(case))
    service = find(manifests, "Service", f"{deployment.metadata.name}-proxy")
    (port,) = service["spec"]["ports"]
    name, space = service["metadata"]["name"], service["metadata"]["namespace"]
    assert endpoint(deployment) == f"http://{name}.{space}.svc:{port['port']}"
    proxy = find(manifests, "Deployment", name)
    assert port["targetPort"] in [one["name"] for one in main_container(proxy)["ports"]]
