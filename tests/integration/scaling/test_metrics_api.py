"""The metrics APIs as clients see them, through the API server: `kubectl get --raw` and nothing else."""

import json
from typing import Any

import httpx
import pytest

from tests.integration.chart.programs import Kubectl, ProgramError
from tests.integration.operator.world import World
from tests.integration.scaling.adapters import AdapterProcess, values
from tests.integration.scaling.engines import engine, make_pod
from tests.support.waiting import eventually

CUSTOM = "/apis/custom.metrics.k8s.io"
EXTERNAL = "/apis/external.metrics.k8s.io/v1beta1"
QUEUED = "epd_engine_queued_media_tokens"
IN_PROGRESS = "epd_engine_requests_in_progress"
VERSIONS = ("v1beta1", "v1beta2")

pytestmark = pytest.mark.usefixtures("adapter")


def get(kubectl: Kubectl, path: str, *arguments: str) -> Any:
    return json.loads(kubectl("get", "--raw", path, *arguments))


def pods(kubectl: Kubectl, world: World, metric: str, query: str = "", version: str = "v1beta1") -> Any:
    return get(kubectl, f"{CUSTOM}/{version}/namespaces/{world.name}/pods/*/{metric}{query}")


def test_both_groups_are_discovered_with_all_their_metrics(kubectl: Kubectl) -> None:
    for version in VERSIONS:
        found = get(kubectl, f"{CUSTOM}/{version}")
        assert found["groupVersion"] == f"custom.metrics.k8s.io/{version}"
        names = {one["name"] for one in found["resources"]}
        assert f"pods/{QUEUED}" in names
        assert all(one["namespaced"] and one["verbs"] == ["get"] for one in found["resources"])
    names = {one["name"] for one in get(kubectl, EXTERNAL)["resources"]}
    assert {QUEUED, "epd_proxy_primer_wait_seconds_p95"} <= names
    assert "custom.metrics.k8s.io/v1beta1" in kubectl("api-versions").split()


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_are_answered_by_selector_and_by_name(kubectl: Kubectl, world: World, version: str) -> None:
    with (
        engine(**{QUEUED: 100.0}) as one,
        engine(**{QUEUED: 200.5}) as other,
        engine(**{IN_PROGRESS: 3}) as pd,
    ):
        make_pod(world, "a", "encoder", one, {"zone": "x", "pod-template-hash": "r1"})
        make_pod(world, "b", "encoder", other, {"zone": "y", "pod-template-hash": "r2"})
        make_pod(world, "c", "pd", pd)
        eventually(lambda: len(values(pods(kubectl, world, QUEUED, version=version))) == 2)
        found = pods(kubectl, world, QUEUED, "?labelSelector=zone%20in%20(x)", version)
        assert found["kind"] == "MetricValueList"
        assert found["apiVersion"] == f"custom.metrics.k8s.io/{version}"
        (item,) = found["items"]
        described = item["describedObject"]
        assert (described["kind"], described["namespace"], described["name"]) == ("Pod", world.name, "a")
        assert item["value"] == "100"
        named = item["metricName"] if version == "v1beta1" else item["metric"]["name"]
        assert named == QUEUED
        assert item["timestamp"].endswith("Z")

        assert values(pods(kubectl, world, QUEUED, version=version)) == {"a": "100", "b": "200500m"}
        by_revision = pods(
            kubectl, world, QUEUED, "?metricLabelSelector=revision%3Dr2,role%3Dencoder", version
        )
        assert values(by_revision) == {"b": "200500m"}
        root = f"{CUSTOM}/{version}/namespaces/{world.name}/pods"
        assert values(get(kubectl, f"{root}/b/{QUEUED}")) == {"b": "200500m"}
        assert values(get(kubectl, f"{root}/%2A/{QUEUED}?labelSelector=zone%3Dx")) == {"a": "100"}
        assert values(get(kubectl, f"{root}/*/{QUEUED}?labelSelector=zone%3Dnowhere")) == {}
        assert values(pods(kubectl, world, IN_PROGRESS, version=version)) == {"c": "3"}


def test_unknown_metrics_and_pods_are_not_found_in_the_words_that_autoscalers_know(
    kubectl: Kubectl, world: World
) -> None:
    root = f"{CUSTOM}/v1beta1/namespaces/{world.name}"
    for path in (
        f"{root}/pods/*/no_such_metric",
        f"{root}/pods/nobody/{QUEUED}",
        f"{root}/services/*/{QUEUED}",
        f"{root}/pods/*/epd_proxy_primer_wait_seconds_p95",
        f"{CUSTOM}/v1beta1/nodes/*/{QUEUED}",
        f"{CUSTOM}/v1beta9/namespaces/{world.name}/pods/*/{QUEUED}",
        f"{EXTERNAL}/namespaces/{world.name}/no_such_metric",
    ):
        with pytest.raises(ProgramError, match="NotFound"):
            get(kubectl, path)
    with pytest.raises(ProgramError, match="could not find the metric no_such_metric for pods"):
        get(kubectl, f"{root}/pods/*/no_such_metric")


def test_a_selector_that_is_none_is_a_bad_request(kubectl: Kubectl, world: World) -> None:
    with pytest.raises(ProgramError, match="labelSelector: no label selector"):
        pods(kubectl, world, QUEUED, "?labelSelector=a%3D%3D%3Db")


def test_roles_are_answered_as_external_metrics(kubectl: Kubectl, world: World) -> None:
    wait = {f'epd_proxy_primer_wait_seconds_bucket{{le="{le}"}}': 0.0 for le in ("0.1", "1.0", "+Inf")}
    ratio = "epd_engine_kv_cache_usage_ratio"
    with (
        engine(**{QUEUED: 100.0}) as one,
        engine(**{QUEUED: 50.0}) as other,
        engine(**{ratio: 0.2}) as pd,
        engine(**{ratio: 0.6}) as pd_too,
        engine(**wait) as proxy,
    ):
        encoders = [("a", "encoder", one), ("b", "encoder", other)]
        for name, role, where in (*encoders, ("c", "pd", pd), ("d", "pd", pd_too), ("p", "proxy", proxy)):
            make_pod(world, name, role, where)
        root = f"{EXTERNAL}/namespaces/{world.name}"

        def found(metric: str, selector: str = "") -> list[tuple[str, str]]:
            answer = get(kubectl, f"{root}/{metric}?labelSelector={selector}")
            assert answer["kind"] == "ExternalMetricValueList"
            assert all(one["metricLabels"]["deployment"] == "demo" for one in answer["items"])
            return [(one["metricLabels"]["role"], one["value"]) for one in answer["items"]]

        eventually(lambda: found(QUEUED) == [("encoder", "150")])
        eventually(lambda: found(ratio, "role%3Dpd,deployment%3Ddemo") == [("pd", "400m")])
        assert found(QUEUED, "deployment%3Dother") == []
        eventually(lambda: found("epd_proxy_primer_wait_seconds_p95") == [("encoder", "0")])
        # From now on one picture in ten waits for longer than 100 ms.
        proxy.metrics |= dict(zip(wait, (90.0, 100.0, 100.0), strict=True))
        eventually(lambda: found("epd_proxy_primer_wait_seconds_p95") == [("encoder", "550m")])


def test_pods_that_start_are_silent_lie_or_go_have_no_metrics(kubectl: Kubectl, world: World) -> None:
    def seen() -> dict[str, str]:
        return values(pods(kubectl, world, QUEUED))

    with engine(**{QUEUED: 7.0}) as well, engine() as loading, engine(**{QUEUED: 9.0}) as ill:
        make_pod(world, "well", "encoder", well)
        make_pod(world, "loading", "encoder", loading)
        make_pod(world, "ill", "encoder", ill)
        make_pod(world, "pending", "encoder", None)
        eventually(lambda: seen() == {"well": "7", "ill": "9"}, 60)
        for body in (b"x" * (5 << 20), f"{QUEUED} NaN\n".encode()):
            ill.body = body
            eventually(lambda: seen() == {"well": "7"}, 60)
            ill.body = None
            eventually(lambda: seen() == {"well": "7", "ill": "9"}, 60)
        ill.status = 503
        eventually(lambda: seen() == {"well": "7"}, 60)
        loading.metrics[QUEUED] = 1.0
        eventually(lambda: seen() == {"well": "7", "loading": "1"}, 60)
        # One that is ending is answered for no longer, though it still answers.
        ending = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 600}
        world.call("DELETE", world.path("pods", "well"), ending)
        eventually(lambda: seen() == {"loading": "1"}, 60)


def test_who_may_not_is_told_so_and_who_may_is_answered(kubectl: Kubectl, world: World) -> None:
    path = f"{CUSTOM}/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}"
    with pytest.raises(ProgramError, match="orbidden"):
        get(kubectl, path, "--as=stranger")
    rule = {"apiGroups": ["custom.metrics.k8s.io"], "resources": [f"pods/{QUEUED}"], "verbs": ["get"]}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "metrics"}}
    kubectl.apply({**role, "rules": [rule]}, "-n", world.name)
    kubectl("-n", world.name, "create", "rolebinding", "metrics", "--role=metrics", "--user=friend")
    eventually(lambda: _answers(kubectl, path, "--as=friend"))
    with pytest.raises(ProgramError, match="orbidden"):
        get(kubectl, path.replace(QUEUED, IN_PROGRESS), "--as=friend")
    # The autoscaler's own account.
    account = "--as=system:serviceaccount:kube-system:horizontal-pod-autoscaler"
    assert get(kubectl, path, account)["items"] == []
    assert get(kubectl, f"{EXTERNAL}/namespaces/{world.name}/{QUEUED}", account)["items"] == []


def test_nobody_gets_past_the_api_server(world: World, kubectl: Kubectl, adapter: AdapterProcess) -> None:
    """Whoever reaches the adapter itself is not believed to be the aggregator."""
    path = f"{CUSTOM}/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}"
    with httpx.Client(base_url=f"https://127.0.0.1:{adapter.port}", verify=False, timeout=30) as direct:
        assert direct.get(path).status_code == 401
        spoofed = {"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}
        assert direct.get(path, headers=spoofed).status_code == 401
        assert direct.get(path, headers={"Authorization": "Bearer nonsense"}).status_code == 401
        token = kubectl("-n", world.name, "create", "token", "default").strip()
        refused = direct.get(path, headers={"Authorization": f"Bearer {token}"} | spoofed)
        assert refused.status_code == 403
        assert refused.json()["kind"] == "Status"
        assert f"system:serviceaccount:{world.name}:default" in refused.json()["message"]
        assert direct.get("/readyz").text == "ok"


def _answers(kubectl: Kubectl, path: str, *arguments: str) -> bool:
    try:
        get(kubectl, path, *arguments)
    except ProgramError:
        return False
    return True


def test_metrics_can_only_be_read(kubectl: Kubectl, world: World, adapter: AdapterProcess) -> None:
    path = f"{CUSTOM}/v1beta1/namespaces/{world.name}/pods/*/{QUEUED}"
    with pytest.raises(ProgramError, match="MethodNotAllowed"):
        kubectl("create", "--raw", path, "-f", "-", given="{}")
