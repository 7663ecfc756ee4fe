"""The golden cases, and resources made of a few lines."""

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from epd_operator.api import EPDDeployment, parse_document
from epd_operator.render import Images, RenderContext, ServedVersions, render

HERE = Path(__file__).parent
IMAGES = Images(
    engine="registry.example/epd-engine:0.1.0",
    proxy="registry.example/epd-proxy:0.1.0",
    vllm=None,
    pull_secrets=("pull",),
)
CONTEXT = RenderContext(ServedVersions(), IMAGES, "epd-system")
OLD_CONTEXT = RenderContext(
    ServedVersions("autoscaling/v2beta2", "policy/v1beta1", "discovery.k8s.io/v1beta1"), IMAGES, "epd-system"
)
KEDA_CONTEXT = RenderContext(
    ServedVersions(keda="keda.sh/v1alpha1"), IMAGES, "epd-system", "http://prometheus.monitoring:9090"
)
CASES = sorted(path.stem for path in (HERE / "cases").glob("*.yaml"))


def context_of(case: str) -> RenderContext:
    """Every case is rendered for a cluster of today, but those that are about another."""
    return {"old-cluster": OLD_CONTEXT, "keda": KEDA_CONTEXT}.get(case, CONTEXT)


def document_of(case: str) -> str:
    return (HERE / "cases" / f"{case}.yaml").read_text()


@functools.cache
def render_case(case: str) -> list[dict[str, Any]]:
    """The manifests of a case; shared by all tests, so not to be changed."""
    return render(parse_document(document_of(case)), context_of(case))


def resource(spec: dict[str, Any] | None = None, name: str = "digits") -> EPDDeployment:
    """A resource whose spec is a minimal one with `spec` over its top-level fields."""
    minimal: dict[str, Any] = {"model": {"source": "./models/digits-vl"}, "roles": {"encoder": {}, "pd": {}}}
    document = {
        "apiVersion": "epd.dev/v1alpha1",
        "kind": "EPDDeployment",
        "metadata": {"name": name, "namespace": "serving", "uid": "0000"},
        "spec": {**minimal, **(spec or {})},
    }
    return EPDDeployment.model_validate(deepcopy(document))


def rendered(spec: dict[str, Any] | None = None, name: str = "digits") -> list[dict[str, Any]]:
    return render(resource(spec, name), CONTEXT)


def encoder(**role: Any) -> dict[str, Any]:
    """The encoder's Deployment of a resource whose encoder has these fields."""
    return find(rendered({"roles": {"encoder": role, "pd": {}}}), "Deployment", "digits-encoder")


def find(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def main_container(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def flag(container: dict[str, Any], name: str) -> str:
    """The value of a flag of a container's command line, the last one where it is repeated."""
    args: list[str] = container["args"]
    return args[len(args) - args[::-1].index(name)]


def as_yaml(manifests: list[dict[str, Any]]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=110)
