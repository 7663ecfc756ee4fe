"""Reading a document: what is accepted, and what is said about what is not."""

import copy
from typing import Any

import pytest
import yaml

from epd_operator.api import DocumentError, EPDDeployment, parse_document

MINIMAL = """
apiVersion: epd.dev/v1alpha1
kind: EPDDeployment
metadata:
  name: digits
spec:
  model:
    source: ./models/digits-vl
  roles:
    encoder: {}
    pd: {}
"""


def changed(path: str, value: Any) -> str:
    """The minimal document with one field set; None removes it."""
    document = copy.deepcopy(yaml.safe_load(MINIMAL))
    *parents, last = path.split(".")
    here = document
    for parent in parents:
        here = here.setdefault(parent, {})
    if value is None:
        del here[last]
    else:
        here[last] = value
    return yaml.safe_dump(document)


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    return [str(problem) for problem in caught.value.problems]


def test_a_minimal_document_names_a_model_and_two_roles() -> None:
    spec = parse_document(MINIMAL).spec
    assert spec.roles.encoder.replicas is None, "absent replicas are not owned"
    assert spec.ec_store.shared_storage is not None
    assert spec.engine.type == "native"
    assert spec.proxy.port == 8000


@pytest.mark.parametrize(
    ("source", "served_name", "is_path", "name"),
    [
        ("./models/digits-vl", None, True, "digits-vl"),
        ("/models/digits-vl/", None, True, "digits-vl"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", None, False, "Qwen/Qwen2.5-VL-3B-Instruct"),
        ("../digits", "mine", True, "mine"),
    ],
)
def test_a_source_is_a_path_or_a_hub_id_and_gives_the_served_name(
    source: str, served_name: str | None, is_path: bool, name: str
) -> None:
    document = yaml.safe_load(MINIMAL)
    document["spec"]["model"] = {"source": source} | ({"servedName": served_name} if served_name else {})
    model = parse_document(yaml.safe_dump(document)).spec.model
    assert (model.is_path, model.name) == (is_path, name)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("apiVersion", "epd.dev/v1", "apiVersion: must be 'epd.dev/v1alpha1', got 'epd.dev/v1'"),
        ("kind", None, "kind: is required: always EPDDeployment"),
        ("metadata.name", "A_b", "metadata.name: must match"),
        ("metadata.name", "a" * 64, "metadata.name: must have at most 63 characters"),
        ("metadata.lables", {}, "metadata.lables: unknown field; did you mean `labels`?"),
        ("spec.model", None, "spec.model: is required: the model that is served"),
        ("spec.model.revision", "main", "spec.model: `revision` has no meaning where `source` is a path"),
        ("spec.roles.pd.replicas", -1, "spec.roles.pd.replicas: must be 0 or more, got -1"),
        ("spec.roles.pd.replicas", "2", "spec.roles.pd.replicas: must be a whole number, got '2'"),
        ("spec.roles.pd.replicas", True, "spec.roles.pd.replicas: must be a whole number, got true"),
        ("spec.roles.pd", None, "spec.roles: needs `pd`, or `prefill` and `decode`"),
        ("spec.roles.prefill", {}, "spec.roles: takes `pd`, or `prefill` and `decode`, not both"),
        ("spec.roles.encoder", "yes", "spec.roles.encoder: must be a mapping of fields, got 'yes'"),
        ("spec.roles.pd.extraArgs", "--x", "spec.roles.pd.extraArgs: must be a list, got '--x'"),
        ("spec.roles.pd.startupTimeout", "7d", "spec.roles.pd.startupTimeout: must be a duration in"),
        ("spec.roles.pd.shmSize", 0.5, "spec.roles.pd.shmSize: must be a quantity such as"),
        ("spec.roles.pd.shmSize", "10 Gi", "spec.roles.pd.shmSize: must be a quantity such as"),
        ("spec.roles.pd.env", [{"name": "A", "value": 1}], "spec.roles.pd.env[0].value: must be text, got 1"),
        ("spec.roles.pd.env", [{"name": "A"}, {"name": "A"}], "spec.roles.pd: `env` names A more than once"),
        (
            "spec.roles.pd.extra_args",
            [],
            "spec.roles.pd.extra_args: unknown field; did you mean `extraArgs`?",
        ),
        (
            "spec.roles.pd",
            {"replicas": 1, "autoscaling": {"maxReplicas": 2}},
            "spec.roles.pd: takes `replicas` or `autoscaling`, not both",
        ),
        (
            "spec.roles.pd.autoscaling",
            {"minReplicas": 3, "maxReplicas": 2},
            "spec.roles.pd.autoscaling: minReplicas (3) must not be more than maxReplicas (2)",
        ),
        (
            "spec.roles.pd.autoscaling",
            {"maxReplicas": 2, "metrics": [{"type": "Pods", "resource": None}]},
            "spec.roles.pd.autoscaling.metrics[0]: type Pods takes `pods`",
        ),
        (
            "spec.roles.pd.strategy.rollingUpdate",
            {"maxSurge": 0, "maxUnavailable": 0},
            "spec.roles.pd.strategy.rollingUpdate: maxSurge and maxUnavailable must not both be 0",
        ),
        ("spec.ecStore", {}, "spec.ecStore: needs `sharedStorage`, `sharedMemory` or both"),
        (
            "spec.ecStore.sharedStorage",
            {"existingClaim": "a", "claimTemplate": {}},
            "spec.ecStore.sharedStorage: takes `claimTemplate` or `existingClaim`, not both",
        ),
        (
            "spec.ecStore.sharedStorage.capacity",
            "20Gi",
            "spec.ecStore.sharedStorage: `capacity` (20Gi) must not be more than the claim's size (10Gi)",
        ),
        ("spec.kvTransfer", {}, "spec: `kvTransfer` has no meaning with `pd`"),
        ("spec.engine.type", "sglang", "spec.engine.type: must be 'native' or 'vllm', got 'sglang'"),
        ("spec.zork", 1, "spec.zork: unknown field; the fields here are model, engine, roles"),
    ],
)
def test_each_problem_is_one_line_with_path_and_way_out(path: str, value: Any, said: str) -> None:
    found = problems(changed(path, value))
    assert [line for line in found if line.startswith(said)], found
    assert len(found) == 1
    assert "\n" not in found[0]


def test_all_problems_are_said_at_once_in_the_order_of_the_document() -> None:
    text = MINIMAL.replace("encoder: {}", "encoder: {replicas: -1}").replace("name: digits", "name: Digits")
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    assert [(one.line, one.path) for one in caught.value.problems] == [
        (5, "metadata.name"),
        (10, "spec.roles.encoder.replicas"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "column", "said"),
    [
        ("a: [1,\nb: 2}", 2, 5, "not valid YAML: expected ',' or ']', but got '}'"),
        ("a: 1\nb: 2\na: 3", 3, 1, "not valid YAML: `a` is written twice"),
        ("1: 2", 1, 1, "not valid YAML: a field's name must be text"),
        ("a: !!python/object:os.system {}", 1, 4, "not valid YAML: could not determine a constructor"),
        ("a: 1\nb: \x07", 2, 4, "not valid YAML: special characters are not allowed"),
        ("", 1, 1, "the document is empty"),
        ("# nothing\n---\n", 1, 1, "the document is empty"),
        ("- 1", 1, 1, "the document: must be a mapping of fields, got a list"),
        (MINIMAL + "---" + MINIMAL, 1, 1, "the document holds 2 documents; one EPDDeployment is wanted"),
    ],
)
def test_what_is_no_document_at_all_is_said_with_its_place(
    text: str, line: int, column: int, said: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text)
    first = caught.value.problems[0]
    assert (first.line, first.column) == (line, column)
    assert str(first).startswith(said)


def test_what_kubectl_prints_can_be_read_back() -> None:
    document = yaml.safe_load(MINIMAL)
    document["metadata"] |= {
        "uid": "0b8a3f5e-0000-4000-8000-000000000000",
        "resourceVersion": "12",
        "generation": 2,
        "creationTimestamp": "2026-11-29T16:00:00Z",
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    }
    document["status"] = {
        "observedGeneration": 2,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "AllReady",
                "lastTransitionTime": "2026-11-29T16:00:00Z",
            }
        ],
        "roles": {"encoder": {"replicas": 1, "readyReplicas": 1}},
    }
    deployment = parse_document(yaml.safe_dump(document))
    assert deployment.status is not None
    assert deployment.status.conditions[0].type == "Ready"


def test_everything_can_be_asked_for_at_once() -> None:
    role = {
        "resources": {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"nvidia.com/gpu": 1}},
        "shmSize": "2Gi",
        "startupTimeout": "1h30m",
        "drainTimeout": "90s",
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "podTemplate": {"metadata": {"labels": {"team": "vision"}}, "spec": {"nodeSelector": {"gpu": "yes"}}},
        "extraArgs": ["--max-num-seqs", "4"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s"}}}],
    }
    scaled = role | {
        "autoscaling": {
            "minReplicas": 1,
            "maxReplicas": 4,
            "provider": "keda",
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": "epd_queued"},
                        "target": {"type": "AverageValue", "averageValue": "100"},
                    },
                },
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu",
                        "target": {"type": "Utilization", "averageUtilization": 80},
                    },
                },
            ],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        }
    }
    document = yaml.safe_load(MINIMAL)
    document["spec"] |= {
        "model": {"source": "org/model", "revision": "main", "cacheClaim": "c", "tokenSecret": {"name": "t"}},
        "engine": {"type": "vllm", "image": "example.org/vllm:1"},
        "roles": {"encoder": scaled, "prefill": role, "decode": role},
        "ecStore": {"sharedMemory": {"capacity": "1Gi"}, "sharedStorage": {"ttl": "24h", "capacity": "8Gi"}},
        "kvTransfer": {"type": "nixl", "extraConfig": {"backends": ["UCX"]}},
        "paused": True,
    }
    again = parse_document(yaml.safe_dump(document)).model_dump(by_alias=True, exclude_unset=True)
    document["spec"]["roles"]["encoder"]["resources"]["requests"]["cpu"] = "2"
    for name in ("encoder", "prefill", "decode"):
        document["spec"]["roles"][name]["resources"] = {
            "requests": {"cpu": "2", "memory": "8Gi"},
            "limits": {"nvidia.com/gpu": "1"},
        }
    assert again == document


def _schemas(schema: Any, path: str) -> Any:
    """Every schema within a schema, with a name to find it by."""
    yield path, schema
    for key in ("properties", "$defs"):
        for name, child in schema.get(key, {}).items():
            yield from _schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _schemas(schema[key], f"{path}.{key}")
    for child in [] if "x-kubernetes-int-or-string" in schema else schema.get("anyOf", []):
        yield from _schemas(child, path)


def test_every_field_is_described_and_every_text_list_and_map_is_bounded() -> None:
    root = EPDDeployment.model_json_schema()
    unbounded, undescribed = [], []
    for path, schema in _schemas(root, ""):
        for name, one in schema.get("properties", {}).items():
            # A field that says what its type says has the type's description.
            target = root["$defs"].get(one.get("$ref", "").rpartition("/")[2], {})
            if not (one.get("description") or target.get("description")):
                undescribed.append(f"{path}.{name}")
        kind = schema.get("type")
        bounds = {
            "string": {"maxLength", "enum", "const"},
            "array": {"maxItems"},
            "object": {"maxProperties"} if "additionalProperties" in schema else set(),
        }
        if schema.get("additionalProperties") is False:
            continue
        if bounds.get(kind) and not bounds[kind] & schema.keys():
            unbounded.append(path)
    assert undescribed == []
    assert unbounded == []
