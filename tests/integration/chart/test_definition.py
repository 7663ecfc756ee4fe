"""The definition on a real API server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from epd_operator.crd.definition import custom_resource_definition
from epd_operator.crd.levels import CelLevel
from epd_operator.crd.text import crd_yaml
from tests.cluster.fixtures import Namespace
from tests.integration.chart.programs import CRD, Kubectl, ProgramError, wait_until_established
from tests.unit.operator.crd.documents import BAD, FORBIDDEN_CHANGES, GOOD, with_fields


@pytest.fixture(scope="module")
def level(kubectl: Kubectl) -> CelLevel:
    """What this API server understands."""
    version = kubectl.json("version")["serverVersion"]
    minor = int(version["minor"].rstrip("+"))
    return CelLevel.NONE if minor < 25 else CelLevel.BASIC if minor < 29 else CelLevel.QUANTITY


@pytest.fixture(scope="module", autouse=True)
def definition(kubectl: Kubectl, level: CelLevel) -> Iterator[None]:
    kubectl("apply", "-f", "-", given=crd_yaml(level))
    wait_until_established(kubectl)
    yield
    kubectl("delete", CRD)


@pytest.fixture
def resource(kubectl: Kubectl, namespace: Namespace) -> str:
    kubectl.apply(with_fields({}), "-n", namespace.name)
    return namespace.name


def set_status(kubectl: Kubectl, namespace: str, status: dict[str, Any]) -> None:
    patch = json.dumps({"status": status})
    kubectl("-n", namespace, "patch", "epd", "digits", "--subresource=status", "--type=merge", "-p", patch)


def test_it_is_accepted_without_a_complaint(kubectl: Kubectl) -> None:
    conditions = {one["type"]: one["status"] for one in kubectl.json("get", CRD)["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions
    assert "KubernetesAPIApprovalPolicyConformant" not in conditions


def test_nothing_of_it_is_dropped(kubectl: Kubectl, level: CelLevel) -> None:
    sent = custom_resource_definition(level)["spec"]["versions"]
    assert kubectl.json("get", CRD)["spec"]["versions"] == sent


def test_defaults_are_filled_in(kubectl: Kubectl, resource: str) -> None:
    spec = kubectl.json("-n", resource, "get", "epd", "digits")["spec"]
    assert spec["engine"] == {"type": "native"}
    assert spec["proxy"] == {"port": 8000, "startupTimeout": "10m", "drainTimeout": "30s"}
    assert spec["roles"]["encoder"] == {"startupTimeout": "10m", "drainTimeout": "30s"}
    assert spec["paused"] is False
    assert "ecStore" not in spec


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"roles.encoder.replicas": -1}, "spec.roles.encoder.replicas"),
        ({"roles.encoder.startupTimeout": "soon"}, "spec.roles.encoder.startupTimeout"),
        ({"engine.type": "other"}, 'spec.engine.type: Unsupported value: "other"'),
        ({"model": None}, "spec.model"),
        ({"roles.pd.shmSize": "much"}, "spec.roles.pd.shmSize"),
        ({"roles.pd.env": [{"name": "A"}, {"name": "A"}]}, "spec.roles.pd.env[1]: Duplicate value"),
        ({"ecStore.sharedStorage.claimTemplate.accessModes": ["Any"]}, "accessModes"),
    ],
)
def test_an_invalid_document_is_refused_with_the_fields_path(
    kubectl: Kubectl, namespace: Namespace, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ProgramError) as refused:
        kubectl.apply(with_fields(fields), "-n", namespace.name, "--validate=false")
    assert said in str(refused.value)


def test_an_unknown_field_is_refused_by_name(kubectl: Kubectl, namespace: Namespace) -> None:
    with pytest.raises(ProgramError, match="replicsa"):
        kubectl.apply(with_fields({"roles.pd.replicsa": 1}), "-n", namespace.name)


@pytest.mark.parametrize("name", ["a.b", "a" * 64])
def test_a_name_that_no_child_could_have_is_refused(
    kubectl: Kubectl, namespace: Namespace, name: str
) -> None:
    with pytest.raises(ProgramError, match=r"metadata\.name"):
        kubectl.apply(with_fields({}) | {"metadata": {"name": name}}, "-n", namespace.name)


def test_good_documents_are_accepted(kubectl: Kubectl, namespace: Namespace) -> None:
    documents = [
        with_fields(fields) | {"metadata": {"name": f"good-{number}"}}
        for number, fields in enumerate(GOOD.values())
    ]
    everything = {"apiVersion": "v1", "kind": "List", "items": documents}
    said = kubectl.apply(everything, "-n", namespace.name, "--dry-run=server")
    assert said.count("created (server dry run)") == len(GOOD)


def test_kubectl_get_shows_the_columns(kubectl: Kubectl, resource: str) -> None:
    status = {
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "EncoderNotReady",
                "lastTransitionTime": "2026-01-31T12:00:00Z",
            }
        ],
        "endpoint": "http://digits.example:8000",
        "roles": {"encoder": {"summary": "1/2"}, "language": "P 1/1 D 0/2"},
        "store": {"summary": "1.2Gi/9.0Gi"},
    }
    set_status(kubectl, resource, status)
    narrow = kubectl("-n", resource, "get", "epd").splitlines()
    assert narrow[0].split() == ["NAME", "READY", "MODEL", "ENCODER", "PD", "LOAD", "AGE"]
    assert narrow[1].split()[:8] == ["digits", "False", "org/model", "1/2", "P", "1/1", "D", "0/2"]
    wide = kubectl("-n", resource, "get", "epd", "-o", "wide").splitlines()
    assert wide[0].split()[-3:] == ["ENDPOINT", "STORE", "REASON"]
    assert wide[1].split()[-3:] == ["http://digits.example:8000", "1.2Gi/9.0Gi", "EncoderNotReady"]


def test_a_status_does_not_change_the_generation_and_a_spec_does(kubectl: Kubectl, resource: str) -> None:
    set_status(kubectl, resource, {"observedGeneration": 1})
    assert kubectl.json("-n", resource, "get", "epd", "digits")["metadata"]["generation"] == 1
    kubectl.apply(with_fields({"paused": True}), "-n", resource)
    assert kubectl.json("-n", resource, "get", "epd", "digits")["metadata"]["generation"] == 2


def test_two_writers_share_a_list_whose_entries_have_names(
    kubectl: Kubectl, namespace: Namespace, level: CelLevel
) -> None:
    if level is CelLevel.NONE:
        pytest.skip("older API servers merge no list by its keys where a field is int-or-string")
    for writer in ("ONE", "TWO"):
        document = with_fields({"proxy.env": [{"name": writer, "value": "1"}]})
        kubectl.apply(document, "-n", namespace.name, "--server-side", f"--field-manager={writer}")
    spec = kubectl.json("-n", namespace.name, "get", "epd", "digits")["spec"]
    assert [variable["name"] for variable in spec["proxy"]["env"]] == ["ONE", "TWO"]


def test_it_is_part_of_all(kubectl: Kubectl, resource: str) -> None:
    assert "epddeployment.epd.dev/digits" in kubectl("-n", resource, "get", "all")


def test_kubectl_explain_describes_every_field(kubectl: Kubectl) -> None:
    text = " ".join(kubectl("explain", "epddeployment.spec.roles.encoder").split())
    assert "Encodes pictures and other media; loads no language model." in text
    assert "How long a replica that is told to end may finish what it has begun." in text


def _refusal(kubectl: Kubectl, fields: dict[str, Any], *arguments: str) -> str:
    try:
        return f"accepted: {kubectl.apply(with_fields(fields), *arguments)}"
    except ProgramError as refused:
        return str(refused)


def test_the_api_server_refuses_what_breaks_a_rule(
    kubectl: Kubectl, namespace: Namespace, level: CelLevel
) -> None:
    if level is not CelLevel.QUANTITY:
        pytest.skip("this API server knows no such rules; they are evaluated in tests/unit/operator/crd")
    for what, (fields, place) in BAD.items():
        assert place in _refusal(kubectl, fields, "-n", namespace.name, "--dry-run=server"), what


def test_the_api_server_refuses_a_change_that_cannot_be_carried_out(
    kubectl: Kubectl, namespace: Namespace, level: CelLevel
) -> None:
    if level is not CelLevel.QUANTITY:
        pytest.skip("this API server knows no such rules; they are evaluated in tests/unit/operator/crd")
    for what, (before, after, field) in FORBIDDEN_CHANGES.items():
        kubectl.apply(with_fields(before), "-n", namespace.name)
        assert field in _refusal(kubectl, after, "-n", namespace.name), what
        kubectl("-n", namespace.name, "delete", "epd", "digits")
