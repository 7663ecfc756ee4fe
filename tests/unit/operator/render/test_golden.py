"""Rendering does not change unnoticed: whoever changes it reads the difference in the golden files.

`EPD_UPDATE_GOLDEN=1 pytest tests/unit/operator/render` writes them anew.
"""

import functools
import json
import os
from copy import deepcopy
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from epd_operator.api import EPDDeployment
from epd_operator.render import render

from .documents import CASES, HERE, as_yaml, context_of, document_of, render_case

UPDATE = os.environ.get("EPD_UPDATE_GOLDEN") == "1"
OLDEST = "1.28"
# The last versions that served what an old cluster serves; for the budget's group that is before all of
# the schemas, so it is judged by its successor's, whose fields are the same.
OLD_VERSIONS = {
    "autoscaling/v2beta2": ("1.25", "autoscaling/v2beta2"),
    "policy/v1beta1": ("1.25", "policy/v1"),
}


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Any:
    """The validator reads a file of megabytes anew for each manifest."""
    patch = pytest.MonkeyPatch()
    utils = kubernetes_validate.utils
    patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    yield
    patch.undo()


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_those_of_the_golden_file(case: str) -> None:
    golden = HERE / "golden" / f"{case}.yaml"
    text = as_yaml(render_case(case))
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert sorted(path.stem for path in (HERE / "golden").glob("*.yaml")) == CASES


@pytest.mark.parametrize("case", CASES)
def test_equal_resources_render_to_equal_bytes(case: str) -> None:
    document = yaml.safe_load(document_of(case))
    first, second, turned = (
        render(EPDDeployment.model_validate(one), context_of(case))
        for one in (document, document, _turned(document))
    )
    assert json.dumps(first) == json.dumps(second) == json.dumps(turned)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid(case: str, version: str) -> None:
    for manifest in render_case(case):
        if manifest["kind"] == "ScaledObject":
            continue  # KEDA's own; test_autoscaling.py says what it must be
        judged_by, api_version = OLD_VERSIONS.get(manifest["apiVersion"], (version, manifest["apiVersion"]))
        kubernetes_validate.validate({**manifest, "apiVersion": api_version}, judged_by, strict=True)


def test_the_validator_finds_what_is_wrong() -> None:
    deployment = deepcopy(next(one for one in render_case("minimal") if one["kind"] == "Deployment"))
    deployment["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePulPolicy"):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)


def _turned(value: Any) -> Any:
    """The same document with the fields of every mapping in the opposite order."""
    if isinstance(value, dict):
        return {field: _turned(value[field]) for field in reversed(value)}
    if isinstance(value, list):
        return [_turned(item) for item in value]
    return value
