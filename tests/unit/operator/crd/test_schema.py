"""The schema is structural and complete, and the chart has it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from epd_operator.api import EPDDeployment
from epd_operator.crd.definition import custom_resource_definition, resource_schema
from epd_operator.crd.levels import CelLevel
from epd_operator.crd.schema import structural_schema
from epd_operator.crd.text import crd_template, crd_yaml

CHART = Path(__file__).resolve().parents[4] / "charts" / "epd-operator"
SCHEMA = resource_schema(CelLevel.QUANTITY)

# All that apiextensions.k8s.io/v1 takes; anything else is refused, or pruned without a word.
KNOWN = {
    "type", "format", "description", "default", "enum", "pattern", "properties", "items", "required",
    "additionalProperties", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum",
    "minProperties", "maxProperties", "x-kubernetes-int-or-string", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
}  # fmt: skip


def places(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema in a schema, with its path."""
    yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from places(one, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from places(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from places(schema["additionalProperties"], f"{path}{{}}")


def at(path: str) -> dict[str, Any]:
    return dict(places(SCHEMA))[path]


def test_the_schema_is_structural() -> None:
    for path, schema in places(SCHEMA):
        assert schema.keys() <= KNOWN, path
        if schema.get("x-kubernetes-int-or-string"):
            assert "type" not in schema, path
        else:
            assert isinstance(schema["type"], str), path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_every_field_has_a_description_in_one_line() -> None:
    for path, schema in places(SCHEMA):
        if path.endswith(("[]", "{}")) or path.startswith("metadata"):
            continue
        assert schema.get("description", "").endswith((".", "`")), path
        assert "\n" not in schema["description"], path


def test_everything_is_bounded() -> None:
    """The API server estimates what rules may cost at worst, and refuses a definition that costs too much."""
    for path, schema in places(SCHEMA["properties"]["spec"], "spec"):
        match schema.get("type"):
            case "string" if "enum" not in schema:
                assert schema["maxLength"] <= 2**18, path
            case "array":
                assert schema["maxItems"] <= 128, path
            case "object" if "additionalProperties" in schema:
                assert schema["maxProperties"] <= 64, path
            case "integer":
                assert {"minimum", "maximum"} <= schema.keys(), path


def test_lists_say_how_they_are_merged() -> None:
    keys = {
        path: schema.get("x-kubernetes-list-map-keys")
        for path, schema in places(SCHEMA)
        if schema.get("x-kubernetes-list-type") == "map"
    }
    assert keys["status.conditions"] == ["type"]
    assert keys["spec.roles.encoder.env"] == keys["spec.proxy.env"] == ["name"]
    lists = [(path, schema) for path, schema in places(SCHEMA) if schema.get("type") == "array"]
    assert all("x-kubernetes-list-type" in schema for _, schema in lists)


def test_defaults_are_kept_where_they_are_plain_and_not_where_they_choose() -> None:
    assert at("spec.roles.pd.startupTimeout")["default"] == "10m"
    assert at("spec.ecStore.sharedStorage.claimTemplate.accessModes")["default"] == ["ReadWriteMany"]
    assert at("spec.proxy")["default"] == {}
    assert at("spec.paused")["default"] is False
    assert "default" not in at("spec.roles.pd.replicas"), "absent means not owned"
    assert "default" not in at("spec.ecStore"), "it would stay beside another tier"
    assert "default" not in at("spec.roles.pd.env")
    assert "default" not in at("spec.model.revision")


def test_optional_fields_are_not_required_and_null_is_not_a_type() -> None:
    assert SCHEMA["required"] == ["spec"]
    assert at("spec")["required"] == ["model", "roles"]
    assert at("spec.roles")["required"] == ["encoder"]
    assert "null" not in str(SCHEMA)


def test_free_objects_keep_their_fields() -> None:
    assert at("spec.roles.pd.podTemplate.spec")["x-kubernetes-preserve-unknown-fields"] is True


def test_patterns_are_of_the_kind_that_go_knows() -> None:
    for path, schema in places(SCHEMA):
        assert not re.search(r"\(\?[^:]|\\\d", schema.get("pattern", "")), f"{path}: lookaround or reference"


def test_what_kubectl_get_shows() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    shown = [column["name"] for column in version["additionalPrinterColumns"] if not column.get("priority")]
    wide = [column["name"] for column in version["additionalPrinterColumns"] if column.get("priority")]
    assert shown == ["Ready", "Model", "Encoder", "PD", "Load", "Age"]
    assert wide == ["Endpoint", "Store", "Reason"]
    assert version["subresources"] == {"status": {}}
    for column in version["additionalPrinterColumns"]:
        path = re.sub(r"\[.*?\]", "[]", column["jsonPath"].removeprefix("."))
        assert path in dict(places(SCHEMA)) or path == "metadata.creationTimestamp", column


def test_what_a_structural_schema_cannot_say_is_refused() -> None:
    class Either(BaseModel):
        one: int | str

    with pytest.raises(ValueError, match=r"Either\.one: a structural schema cannot say 2 alternatives"):
        structural_schema(Either)


def test_the_charts_copy_is_not_stale() -> None:
    assert (CHART / "templates" / "crd.yaml").read_text() == crd_template(), (
        "run: epd crd --helm > charts/epd-operator/templates/crd.yaml"
    )


@pytest.mark.parametrize("level", CelLevel)
def test_the_text_is_the_definition(level: CelLevel) -> None:
    assert yaml.safe_load(crd_yaml(level)) == custom_resource_definition(level)


def test_epd_crd_prints_the_definition() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "epd_operator", "crd", "--cel", "none"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert yaml.safe_load(printed.stdout) == custom_resource_definition(CelLevel.NONE)


def test_the_models_and_the_schema_have_the_same_fields() -> None:
    spec = EPDDeployment.model_fields["spec"].annotation
    assert spec is not None
    assert set(SCHEMA["properties"]["spec"]["properties"]) == {
        field.alias for field in spec.model_fields.values()
    }
