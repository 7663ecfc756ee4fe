"""The chart's life in a cluster, by real Helm; the last test ends it."""

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client, config

from tests.cluster.base import Cluster
from tests.integration.chart.programs import (
    CHART,
    CRD,
    Helm,
    Kubectl,
    ProgramError,
    wait_until_established,
)
from tests.integration.cluster.patience import until
from tests.unit.operator.crd.documents import with_fields

RELEASE = "epd"
OPERATOR = "epd-epd-operator"


def chart_of_before(directory: Path) -> Path:
    """The chart with a definition that is not today's."""
    copy = shutil.copytree(CHART, directory / "epd-operator")
    template = copy / "templates" / "crd.yaml"
    template.write_text(template.read_text().replace("name: Ready", "name: Works"))
    return copy


@pytest.fixture(scope="module")
def release(helm: Helm, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A namespace in which the chart of before is installed; no pod is waited for, since none can run."""
    before = chart_of_before(tmp_path_factory.mktemp("chart"))
    name = f"release-{uuid.uuid4().hex[:8]}"
    kubectl("delete", CRD, "--ignore-not-found")
    helm("install", RELEASE, str(before), "-n", name, "--create-namespace")
    wait_until_established(kubectl)
    yield name
    # What belongs to no namespace must not stay when a test fails.
    helm("uninstall", RELEASE, "-n", name, "--ignore-not-found")
    kubectl("delete", CRD)
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def api(control_plane: Cluster) -> Iterator[client.ApiClient]:
    with config.new_client_from_config(str(control_plane.kubeconfig)) as connection:
        yield connection


def columns(kubectl: Kubectl) -> list[str]:
    version = kubectl.json("get", CRD)["spec"]["versions"][0]
    return [column["name"] for column in version["additionalPrinterColumns"][:2]]


def replicas(kubectl: Kubectl, namespace: str) -> int:
    return int(kubectl.json("-n", namespace, "get", "deployment", OPERATOR)["spec"]["replicas"])


def test_notes_say_what_is_next_and_that_the_proxy_is_open(helm: Helm, release: str) -> None:
    notes = helm("get", "notes", RELEASE, "-n", release)
    assert f"in namespace {release}" in notes
    assert "serves everybody" in notes
    assert "spec.proxy.apiKeysSecret" in notes
    assert "kubectl delete crd epddeployments.epd.dev" in notes


CHILDREN = ("get", "list", "watch", "create", "patch", "delete")
READ = ("get", "list", "watch")

ALLOWED = {
    ("epd.dev", "epddeployments"): READ,
    ("epd.dev", "epddeployments/status"): ("get", "patch"),
    ("apps", "deployments"): CHILDREN,
    ("", "services"): CHILDREN,
    ("", "persistentvolumeclaims"): CHILDREN,
    ("", "serviceaccounts"): CHILDREN,
    ("rbac.authorization.k8s.io", "roles"): CHILDREN,
    ("rbac.authorization.k8s.io", "rolebindings"): CHILDREN,
    ("policy", "poddisruptionbudgets"): CHILDREN,
    ("networking.k8s.io", "networkpolicies"): CHILDREN,
    ("autoscaling", "horizontalpodautoscalers"): CHILDREN,
    ("keda.sh", "scaledobjects"): CHILDREN,
    ("", "pods"): READ,
    ("discovery.k8s.io", "endpointslices"): READ,
    ("", "events"): ("get", "create", "patch"),
}

FORBIDDEN = {
    ("", "secrets"): ("get", "list"),
    ("", "configmaps"): ("get", "create"),
    ("", "pods"): ("create", "delete"),
    ("", "pods/exec"): ("create",),
    ("", "nodes"): ("get", "list"),
    ("", "namespaces"): ("list",),
    ("apiextensions.k8s.io", "customresourcedefinitions"): ("list", "patch"),
    ("epd.dev", "epddeployments"): ("create", "patch", "delete"),
    ("rbac.authorization.k8s.io", "clusterroles"): ("create",),
    ("rbac.authorization.k8s.io", "roles"): ("bind", "escalate"),
}


def allowed(api: client.ApiClient, user: str, verb: str, resource: tuple[str, str], namespace: str) -> bool:
    group, name = resource
    name, _, subresource = name.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": name,
        "subresource": subresource,
        "namespace": namespace,
    }
    review = {"spec": {"user": user, "resourceAttributes": attributes}}
    answer = client.AuthorizationV1Api(api).create_subject_access_review(review)
    return bool(answer.status.allowed)


def test_the_operator_may_do_what_it_needs_and_no_more(api: client.ApiClient, release: str) -> None:
    account = f"system:serviceaccount:{release}:{OPERATOR}"

    def may(verb: str, resource: tuple[str, str], where: str = "default") -> bool:
        return allowed(api, account, verb, resource, where)

    assert [(r, v) for r, verbs in ALLOWED.items() for v in verbs if not may(v, r)] == []
    assert [(r, v) for r, verbs in FORBIDDEN.items() for v in verbs if may(v, r)] == []
    lease = ("coordination.k8s.io", "leases")
    assert may("create", lease, release)
    assert may("update", lease, release)
    assert not may("get", lease, "kube-system")


def test_the_operator_hands_on_what_proxies_need_and_nothing_else(
    kubectl: Kubectl, api: client.ApiClient, release: str
) -> None:
    account = f"system:serviceaccount:{release}:{OPERATOR}"

    def role(resource: str, group: str) -> dict[str, object]:
        rule = {"apiGroups": [group], "resources": [resource], "verbs": ["get", "list", "watch"]}
        return {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": resource},
            "rules": [rule],
        }

    kubectl.apply(role("endpointslices", "discovery.k8s.io"), "-n", release, f"--as={account}")
    with pytest.raises(ProgramError, match="attempting to grant RBAC permissions not currently held"):
        kubectl.apply(role("secrets", ""), "-n", release, f"--as={account}")


def test_users_who_may_edit_a_namespace_may_edit_resources_in_it(
    kubectl: Kubectl, api: client.ApiClient, release: str
) -> None:
    for who in ("view", "edit"):
        kubectl("-n", release, "create", "rolebinding", who, f"--clusterrole={who}", f"--user={who}")
    resource = ("epd.dev", "epddeployments")
    # Roles are put together by a controller, a moment later.
    until(lambda: allowed(api, "edit", "create", resource, release), "the edit role")
    assert allowed(api, "view", "list", resource, release)
    assert not allowed(api, "view", "patch", resource, release)


def test_upgrade_rollback_and_uninstall_keep_the_resources(
    helm: Helm, kubectl: Kubectl, api: client.ApiClient, release: str
) -> None:
    account = f"system:serviceaccount:{release}:{OPERATOR}"
    kubectl.apply(with_fields({}), "-n", release)
    uid = kubectl.json("-n", release, "get", "epd", "digits")["metadata"]["uid"]
    assert columns(kubectl) == ["Works", "Model"]

    helm("upgrade", RELEASE, str(CHART), "-n", release, "--set", "replicas=2", "--set", "scope=namespace")
    assert replicas(kubectl, release) == 2
    assert "poddisruptionbudget" in kubectl("-n", release, "get", "pdb", "-o", "name")
    # Helm never touches again what lies in a chart's crds/ folder; ours is a template.
    assert columns(kubectl) == ["Ready", "Model"]
    assert allowed(api, account, "create", ("apps", "deployments"), release)
    assert not allowed(api, account, "get", ("apps", "deployments"), "default")

    helm("rollback", RELEASE, "1", "-n", release)
    assert replicas(kubectl, release) == 1
    assert kubectl("-n", release, "get", "pdb", "-o", "name") == ""
    history = json.loads(helm("history", RELEASE, "-n", release, "-o", "json"))
    assert [one["status"] for one in history] == ["superseded", "superseded", "deployed"]

    helm("uninstall", RELEASE, "-n", release)
    left = kubectl("-n", release, "get", "deployment,service,role,rolebinding", "-o", "name").split()
    assert [name for name in left if OPERATOR in name] == []
    assert OPERATOR not in kubectl("get", "clusterrole,clusterrolebinding", "-o", "name")
    assert kubectl.json("-n", release, "get", "epd", "digits")["metadata"]["uid"] == uid

    helm("install", RELEASE, str(CHART), "-n", release)
    assert kubectl.json("-n", release, "get", "epd", "digits")["metadata"]["uid"] == uid
