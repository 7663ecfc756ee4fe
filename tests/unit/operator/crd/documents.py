"""Documents that break one rule each, and some that break none."""

import copy
from typing import Any

Document = dict[str, Any]

MINIMAL: Document = {
    "apiVersion": "epd.dev/v1alpha1",
    "kind": "EPDDeployment",
    "metadata": {"name": "digits"},
    "spec": {"model": {"source": "org/model"}, "roles": {"encoder": {}, "pd": {}}},
}


def with_fields(fields: dict[str, Any], base: Document = MINIMAL) -> Document:
    """A document with some fields set, each named by its path in the spec; None removes one."""
    document = copy.deepcopy(base)
    for path, value in fields.items():
        *parents, last = path.split(".")
        here = document["spec"]
        for parent in parents:
            here = here.setdefault(parent, {})
        if value is None:
            del here[last]
        else:
            here[last] = copy.deepcopy(value)
    return document


def _metric(kind: str, target: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {"type": kind} | {
        field: ({"name": "cpu"} if field == "resource" else {"metric": {"name": "m"}}) | {"target": target}
        for field in fields
    }


def _scaled(**autoscaling: Any) -> dict[str, Any]:
    return {"roles.pd.autoscaling": {"maxReplicas": 3} | autoscaling}


def _sleeping(**autoscaling: Any) -> dict[str, Any]:
    return {"roles.encoder.autoscaling": {"minReplicas": 0, "maxReplicas": 3} | autoscaling}


_CPU = {"type": "Utilization", "averageUtilization": 60}
_SPLIT = {"roles.pd": None, "roles.prefill": {}, "roles.decode": {}}
_STORE = "ecStore.sharedStorage"

GOOD: dict[str, dict[str, Any]] = {
    "minimal": {},
    "prefill and decode": _SPLIT,
    "kv transfer between them": _SPLIT | {"kvTransfer": {"type": "nixl"}},
    "vllm": {"engine.type": "vllm"},
    "vllm with memory before files": {
        "engine.type": "vllm",
        "ecStore": {"sharedMemory": {}, "sharedStorage": {}},
    },
    "vllm with prefill and decode": _SPLIT | {"engine.type": "vllm", "kvTransfer": {"type": "nixl"}},
    "replicas": {"roles.pd.replicas": 2, "roles.encoder.replicas": 0},
    "scaled by a resource": _scaled(metrics=[_metric("Resource", _CPU, "resource")]),
    "encoders that may end": _sleeping(),
    "encoders that may end, by a metric from outside": _sleeping(
        metrics=[_metric("External", {"type": "AverageValue", "averageValue": 5}, "external")]
    ),
    "scaled by a metric": _scaled(
        metrics=[_metric("Pods", {"type": "AverageValue", "averageValue": 5}, "pods")]
    ),
    "a revision of a hub id": {"model.revision": "main"},
    "a path in a claim": {"model": {"claim": "models", "source": "./x"}},
    "memory": {"ecStore.sharedMemory": {}},
    "two tiers": {"ecStore": {"sharedMemory": {"capacity": "1Gi"}, "sharedStorage": {"ttl": "1h"}}},
    "a policy of writing": {"ecStore": {"sharedMemory": {}, "sharedStorage": {}, "write": "back"}},
    "two claims of one's own": {
        "ecStore": {"sharedMemory": {"existingClaim": "one"}, "sharedStorage": {"existingClaim": "two"}}
    },
    "a claim of another resource": {f"{_STORE}.existingClaim": "other-store"},
    "a claim of one's own": {f"{_STORE}.existingClaim": "mine", f"{_STORE}.capacity": "100Gi"},
    "capacity within the claim": {f"{_STORE}.capacity": "20Gi", f"{_STORE}.claimTemplate": {"size": "30Gi"}},
    "capacity as a number": {f"{_STORE}.capacity": 10_000},
    "capacity of the default claim": {f"{_STORE}.capacity": "10Gi"},
    "recreate": {"roles.pd.strategy": {"type": "Recreate"}},
    "surge": {"roles.pd.strategy.rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
    "variables": {
        "roles.pd.env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}]
    },
}

# What breaks, and the place at which it is said.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "pd and prefill": ({"roles.prefill": {}}, "spec.roles"),
    "prefill alone": ({"roles.pd": None, "roles.prefill": {}}, "spec.roles"),
    "decode alone": ({"roles.pd": None, "roles.decode": {}}, "spec.roles"),
    "no language model": ({"roles.pd": None}, "spec.roles"),
    "replicas and autoscaling": (
        {"roles.encoder.replicas": 1, "roles.encoder.autoscaling": {"maxReplicas": 2}},
        "spec.roles.encoder",
    ),
    "kv transfer with pd": ({"kvTransfer": {}}, "spec"),
    "vllm with memory alone": ({"engine.type": "vllm", "ecStore.sharedMemory": {}}, "spec"),
    "vllm that writes files later": (
        {"engine.type": "vllm", "ecStore": {"sharedMemory": {}, "sharedStorage": {}, "write": "back"}},
        "spec",
    ),
    "vllm with kv in files": (
        _SPLIT | {"engine.type": "vllm", "kvTransfer": {"type": "sharedStorage"}},
        "spec",
    ),
    "a revision of a path": ({"model": {"source": "/models/x", "revision": "main"}}, "spec.model"),
    "a revision of a relative path": ({"model": {"source": "../x", "revision": "main"}}, "spec.model"),
    "a hub id in a claim": ({"model.claim": "models"}, "spec.model"),
    "a path out of a claim": ({"model": {"claim": "models", "source": "./../x"}}, "spec.model"),
    "no store": ({"ecStore": {}}, "spec.ecStore"),
    "two claims": (
        {f"{_STORE}.claimTemplate": {}, f"{_STORE}.existingClaim": "mine"},
        "spec.ecStore.sharedStorage",
    ),
    "a policy of writing to one tier": (
        {"ecStore": {"sharedMemory": {}, "write": "through"}},
        "spec.ecStore",
    ),
    "one claim for two tiers": (
        {"ecStore": {"sharedMemory": {"existingClaim": "a"}, "sharedStorage": {"existingClaim": "a"}}},
        "spec.ecStore",
    ),
    "two values of a variable of the janitor": (
        {f"{_STORE}": {}, "ecStore.janitor.env": [{"name": "A", "value": "1", "valueFrom": {}}]},
        "spec.ecStore.janitor.env[0]",
    ),
    "no capacity": ({f"{_STORE}.capacity": 0}, "spec.ecStore.sharedStorage"),
    "capacity beyond the claim": (
        {f"{_STORE}.capacity": "2Ti", f"{_STORE}.claimTemplate": {"size": "1Ti"}},
        "spec.ecStore.sharedStorage",
    ),
    "capacity beyond the default claim": (
        {"ecStore.sharedMemory.capacity": "11Gi"},
        "spec.ecStore.sharedMemory",
    ),
    "a rollout that cannot move": (
        {"proxy.strategy.rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}},
        "spec.proxy.strategy.rollingUpdate",
    ),
    "limits of what is recreated": (
        {"roles.pd.strategy": {"type": "Recreate", "rollingUpdate": {}}},
        "spec.roles.pd.strategy",
    ),
    "two values of a variable": (
        {"proxy.env": [{"name": "A", "value": "1", "valueFrom": {}}]},
        "spec.proxy.env[0]",
    ),
    "encoders that processors cannot wake": (
        _sleeping(provider="resource"),
        "spec.roles.encoder.autoscaling",
    ),
    "encoders that their pods cannot wake": (
        _sleeping(metrics=[_metric("Pods", {"type": "AverageValue", "averageValue": 5}, "pods")]),
        "spec.roles.encoder.autoscaling",
    ),
    "a pd that may end": (_scaled(minReplicas=0), "spec.roles"),
    "a prefill that may end": (
        _SPLIT | {"roles.prefill": {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}},
        "spec.roles",
    ),
    "more at least than at most": (_scaled(minReplicas=4), "spec.roles.pd.autoscaling"),
    "a metric without its source": (
        _scaled(metrics=[_metric("Pods", {"type": "Value", "value": 1}, "external")]),
        "spec.roles.pd.autoscaling.metrics[0]",
    ),
    "a metric with two sources": (
        _scaled(metrics=[_metric("Pods", {"type": "Value", "value": 1}, "pods", "external")]),
        "spec.roles.pd.autoscaling.metrics[0]",
    ),
    "a target without its number": (
        _scaled(metrics=[_metric("Resource", {"type": "Utilization", "averageValue": 1}, "resource")]),
        "spec.roles.pd.autoscaling.metrics[0].resource.target",
    ),
    "a target with two numbers": (
        _scaled(metrics=[_metric("Resource", _CPU | {"value": 1}, "resource")]),
        "spec.roles.pd.autoscaling.metrics[0].resource.target",
    ),
}

# The operator's own claims, named as somebody else's: found at the root, and said of the field by Python.
OWN_CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    f"{suffix} for {store}": (
        {f"ecStore.{store}.existingClaim": f"digits-{suffix}"},
        f"spec.ecStore.{store}.existingClaim",
    )
    for store in ("sharedStorage", "sharedMemory")
    for suffix in ("store", "store-memory")
}

_TEMPLATE = f"{_STORE}.claimTemplate"
_MEMORY = "ecStore.sharedMemory.claimTemplate"

ALLOWED_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "a default written out": ({}, {_TEMPLATE: {"size": "10Gi", "accessModes": ["ReadWriteMany"]}}),
    "a default left out again": ({_TEMPLATE: {"size": "10Gi"}}, {}),
    "a larger claim": ({_TEMPLATE: {"size": "10Gi"}}, {_TEMPLATE: {"size": "0.1Ti"}}),
    "a claim larger than by default": ({}, {_TEMPLATE: {"size": "11Gi"}}),
    "the same size in other words": ({_TEMPLATE: {"size": "2Gi"}}, {_TEMPLATE: {"size": 2**31}}),
    "to a claim of one's own": (
        {_TEMPLATE: {"storageClassName": "fast"}},
        {f"{_STORE}.existingClaim": "mine"},
    ),
    "to a claim of the operator's": (
        {f"{_STORE}.existingClaim": "mine"},
        {_TEMPLATE: {"size": "1Gi", "storageClassName": "fast"}},
    ),
    "from files to memory": ({_TEMPLATE: {"storageClassName": "fast"}}, {"ecStore.sharedMemory": {}}),
    "a second tier": ({}, {"ecStore": {"sharedStorage": {}, "sharedMemory": {}}}),
    "another topology": ({}, _SPLIT),
    "another engine and model": ({}, {"engine.type": "vllm", "model.source": "org/other"}),
    "retention": ({}, {f"{_STORE}.retention": "Retain"}),
}

FORBIDDEN_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another class": (
        {_TEMPLATE: {"storageClassName": "fast"}},
        {_TEMPLATE: {"storageClassName": "slow"}},
        f"{_TEMPLATE}.storageClassName",
    ),
    "a class where there was none": (
        {},
        {_TEMPLATE: {"storageClassName": "fast"}},
        f"{_TEMPLATE}.storageClassName",
    ),
    "no class where there was one": (
        {_TEMPLATE: {"storageClassName": "fast"}},
        {},
        f"{_TEMPLATE}.storageClassName",
    ),
    "other access modes": (
        {_TEMPLATE: {"accessModes": ["ReadWriteOnce"]}},
        {_TEMPLATE: {"accessModes": ["ReadWriteMany", "ReadWriteOnce"]}},
        f"{_TEMPLATE}.accessModes",
    ),
    "other access modes than by default": (
        {},
        {_TEMPLATE: {"accessModes": ["ReadWriteOnce"]}},
        f"{_TEMPLATE}.accessModes",
    ),
    "the default access modes again": (
        {_TEMPLATE: {"accessModes": ["ReadWriteOnce"]}},
        {},
        f"{_TEMPLATE}.accessModes",
    ),
    "a smaller claim": ({_TEMPLATE: {"size": "1Ti"}}, {_TEMPLATE: {"size": "999Gi"}}, f"{_TEMPLATE}.size"),
    "a claim smaller than by default": ({}, {_TEMPLATE: {"size": "9Gi"}}, f"{_TEMPLATE}.size"),
    "the default size after a larger one": ({_TEMPLATE: {"size": "11Gi"}}, {}, f"{_TEMPLATE}.size"),
    "memory's class": (
        {_MEMORY: {"storageClassName": "ram"}},
        {_MEMORY: {"storageClassName": "other"}},
        f"{_MEMORY}.storageClassName",
    ),
    "memory's size": ({_MEMORY: {"size": "2Gi"}}, {_MEMORY: {"size": "1Gi"}}, f"{_MEMORY}.size"),
}
