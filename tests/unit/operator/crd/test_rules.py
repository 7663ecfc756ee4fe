"""The CEL rules, evaluated, say the same as the operator's own checks in Python."""

from typing import Any

import pytest
import yaml

from epd_operator.api import DocumentError, EPDDeployment, parse_document
from epd_operator.api.names import child_name
from epd_operator.crd.definition import resource_schema
from epd_operator.crd.levels import CelLevel
from epd_operator.crd.rules import RULES
from epd_operator.crd.transitions import claim_conflicts, forbidden_changes
from tests.unit.operator.crd.api_server import broken_rules, with_defaults
from tests.unit.operator.crd.documents import (
    ALLOWED_CHANGES,
    BAD,
    FORBIDDEN_CHANGES,
    GOOD,
    OWN_CLAIMS,
    with_fields,
)

SCHEMA = resource_schema(CelLevel.QUANTITY)


def broken(fields: dict[str, Any], before: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    new = with_defaults(SCHEMA, with_fields(fields))
    old = None if before is None else with_defaults(SCHEMA, with_fields(before))
    return list(broken_rules(SCHEMA, new, old))


def spec_of(fields: dict[str, Any]) -> Any:
    return EPDDeployment.model_validate(with_fields(fields)).spec


@pytest.mark.parametrize("fields", GOOD.values(), ids=GOOD.keys())
def test_a_good_document_breaks_no_rule(fields: dict[str, Any]) -> None:
    assert broken(fields) == []
    EPDDeployment.model_validate(with_defaults(SCHEMA, with_fields(fields)))


@pytest.mark.parametrize(("fields", "place"), BAD.values(), ids=BAD.keys())
def test_a_bad_document_breaks_one_rule_and_python_says_the_same_place(
    fields: dict[str, Any], place: str
) -> None:
    assert [path for path, _ in broken(fields)] == [place]
    with pytest.raises(DocumentError) as caught:
        parse_document(yaml.safe_dump(with_fields(fields)))
    assert [problem.path for problem in caught.value.problems] == [place]


@pytest.mark.parametrize(("fields", "field"), OWN_CLAIMS.values(), ids=OWN_CLAIMS.keys())
def test_the_operators_own_claim_is_nobody_elses(fields: dict[str, Any], field: str) -> None:
    ((place, message),) = broken(fields)
    assert place == ""
    assert message.startswith(f"{field} is the claim that the operator makes")
    with pytest.raises(DocumentError) as caught:
        parse_document(yaml.safe_dump(with_fields(fields)))
    (problem,) = caught.value.problems
    assert problem.path == field
    assert problem.line > 1


def test_the_operators_own_claim_is_known_by_a_long_name_too() -> None:
    document = with_fields({"ecStore.sharedStorage.existingClaim": child_name("d" * 60, "store")})
    document["metadata"]["name"] = "d" * 60
    with pytest.raises(DocumentError, match="is the name of the claim that the operator makes"):
        parse_document(yaml.safe_dump(document))


@pytest.mark.parametrize(("before", "after"), ALLOWED_CHANGES.values(), ids=ALLOWED_CHANGES.keys())
def test_a_change_that_can_be_carried_out_is_allowed(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert broken(after, before) == []
    assert forbidden_changes(spec_of(before), spec_of(after)) == []


@pytest.mark.parametrize(("before", "after", "field"), FORBIDDEN_CHANGES.values(), ids=FORBIDDEN_CHANGES)
def test_a_change_that_cannot_be_carried_out_is_refused_by_both(
    before: dict[str, Any], after: dict[str, Any], field: str
) -> None:
    said = [message for _, message in broken(after, before)]
    assert len(said) == 1
    assert said[0].startswith(field)
    assert [change.path for change in forbidden_changes(spec_of(before), spec_of(after))] == [f"spec.{field}"]


def test_every_rule_is_broken_by_a_document_here() -> None:
    messages = {
        message for fields, _ in (*BAD.values(), *OWN_CLAIMS.values()) for _, message in broken(fields)
    }
    messages |= {
        message for before, after, _ in FORBIDDEN_CHANGES.values() for _, message in broken(after, before)
    }
    uncovered = {rule.message for rule in RULES} - messages
    assert uncovered <= {
        # The same rule as for files, which is.
        "ecStore.sharedMemory.claimTemplate.accessModes cannot be changed:"
        " the claim exists; use another resource, or existingClaim"
    }


def test_quantities_are_compared_only_where_the_api_server_can() -> None:
    basic = str(resource_schema(CelLevel.BASIC))
    assert "x-kubernetes-validations" in basic
    assert "quantity(" not in basic
    assert "x-kubernetes-validations" not in str(resource_schema(CelLevel.NONE))


CLAIM: dict[str, Any] = {
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "standard",
        "resources": {"requests": {"storage": "10Gi"}},
    }
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"ecStore.sharedStorage.claimTemplate": {"storageClassName": "standard", "size": "20Gi"}}, []),
        ({"ecStore.sharedStorage.existingClaim": "mine"}, []),
        (
            {"ecStore.sharedStorage.claimTemplate": {"storageClassName": "fast"}},
            ["storageClassName: cannot be changed from standard to fast"],
        ),
        (
            {"ecStore.sharedStorage.claimTemplate": {"accessModes": ["ReadWriteOnce"]}},
            ["accessModes: cannot be changed from ReadWriteMany to ReadWriteOnce"],
        ),
        (
            {"ecStore.sharedStorage.claimTemplate": {"size": "5Gi"}},
            ["size: may only grow, not from 10Gi to 5Gi"],
        ),
    ],
)
def test_the_claim_on_the_cluster_is_what_a_spec_is_held_against(
    fields: dict[str, Any], said: list[str]
) -> None:
    conflicts = [str(change) for change in claim_conflicts(spec_of(fields), "sharedStorage", CLAIM)]
    assert len(conflicts) == len(said)
    for conflict, words in zip(conflicts, said, strict=True):
        assert conflict.startswith(f"spec.ecStore.sharedStorage.claimTemplate.{words}")
