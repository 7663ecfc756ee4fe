"""Applying what is rendered a second time writes nothing: of every golden case, by the API server's word."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_operator.api import EPDDeployment
from epd_operator.apply.api import Api
from epd_operator.apply.children import Children
from epd_operator.apply.kinds import Kind, child_kinds, choose_versions
from epd_operator.apply.ownership import Owner
from epd_operator.apply.plan import Ref, plan, ref_of
from epd_operator.handlers.access import Access
from epd_operator.handlers.metrics import Metrics
from epd_operator.render import Images, RenderContext, render
from tests.cluster.paths import REPOSITORY
from tests.integration.operator.world import World

Object = dict[str, Any]
# Cases that a cluster without KEDA, and without the gate HPAScaleToZero, refuses.
REFUSED = {"keda", "sleeping"}
CASES = [
    path
    for path in sorted((REPOSITORY / "tests" / "unit" / "operator" / "render" / "cases").glob("*.yaml"))
    if path.stem not in REFUSED
]
IMAGES = Images("registry.example/engine:1", "registry.example/proxy:1", None)
ATTEMPTS = 20


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_second_apply_of_what_is_rendered_writes_nothing(
    world: World, case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(world.cluster.kubeconfig))
    asyncio.run(_check(world, _resource(case.read_text(), world.name)))


def _resource(text: str, namespace: str) -> EPDDeployment:
    document = yaml.safe_load(text)
    document["metadata"]["namespace"] = namespace
    # No such resource is there, and the children of an owner that is not are collected.
    del document["metadata"]["uid"]
    # Kubernetes 1.20 takes no empty text in an entry of a list.
    for role in document["spec"]["roles"].values():
        role["env"] = [one for one in role.get("env", []) if one.get("value") != ""]
    return EPDDeployment.model_validate(document)


async def _check(world: World, deployment: EPDDeployment) -> None:
    versions = choose_versions(world.call("GET", "/apis")["groups"])
    manifests = render(deployment, RenderContext(versions, IMAGES, "epd-system"))
    kinds = {kind.kind: kind for kind in child_kinds(versions)}
    owner = Owner(deployment.metadata.name, "none")
    access = Access(Metrics().requests)
    api = Api(access.session(), access.info.server)
    try:
        outcome = await Children(api, kinds.values()).carry_out(plan(manifests, {}, owner, ()), {}, owner)
        assert outcome.problems == []
        assert len(outcome.written) == len(manifests)
        live = {ref_of(one): await _found(api, one, kinds) for one in manifests}
        again = plan(manifests, live, owner, list(kinds))
        assert again.is_empty, [ref_of(one) for one in again.apply]
        assert again.refused == []
        for manifest in manifests:
            await _assert_no_write(api, manifest, kinds)
    finally:
        await api.close()


async def _assert_no_write(api: Api, manifest: Object, kinds: dict[str, Kind]) -> None:
    """Controllers write, too (a status, a revision): what counts is one attempt with nobody in between."""
    seen: list[list[str]] = []
    for _ in range(ATTEMPTS):
        before = await _found(api, manifest, kinds)
        after = await api.apply(_path(manifest, kinds), manifest)
        seen.append([one["metadata"]["resourceVersion"] for one in (before, after)])
        if seen[-1][0] == seen[-1][1]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{ref_of(manifest)} was written each time: {seen}")


async def _found(api: Api, manifest: Object, kinds: dict[str, Kind]) -> Object:
    found = await api.get(_path(manifest, kinds))
    assert found is not None, Ref(manifest["kind"], manifest["metadata"]["name"])
    return found | {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}


def _path(manifest: Object, kinds: dict[str, Kind]) -> str:
    metadata = manifest["metadata"]
    return kinds[manifest["kind"]].path(metadata["namespace"], metadata["name"])
