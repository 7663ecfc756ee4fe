"""Reading an `EPDDeployment` from YAML, with every problem named by its place."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from .deployment import KIND, EPDDeployment
from .problems import Location, explain, path_of


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a document. `line` and `column` count from 1; `path` is empty for YAML itself."""

    path: str
    message: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class DocumentError(ValueError):
    """A document that is no valid `EPDDeployment`; `problems` is never empty."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: one of the two values would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    None, None, "a field's name must be text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key.value}` is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_document(text: str) -> EPDDeployment:
    """The one `EPDDeployment` in a YAML (or JSON) text.

    Raises DocumentError with every problem found, in the order of the document.
    """
    node, value = _parse_yaml(text)
    try:
        return EPDDeployment.model_validate(value)
    except ValidationError as error:
        problems = [_problem(node, location, words) for location, words in explain(error, EPDDeployment)]
        raise DocumentError(sorted(problems, key=lambda problem: problem.line)) from None


def _parse_yaml(text: str) -> tuple[yaml.Node, Any]:
    """The root node, which knows the lines, and the value made of it."""
    try:
        loader = _Loader(text)
        nodes = []
        while loader.check_node():
            nodes.append(loader.get_node())
        found = [node for node in nodes if node is not None and node.tag != "tag:yaml.org,2002:null"]
        if len(found) != 1:
            words = f"holds {len(found)} documents; one {KIND} is wanted" if found else "is empty"
            raise DocumentError([Problem("", f"the document {words}", 1, 1)])
        return found[0], loader.construct_document(found[0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise DocumentError([Problem("", f"not valid YAML: {error.problem}", line, column)]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise DocumentError([Problem("", f"not valid YAML: {error.reason}", line, column)]) from None


def _problem(root: yaml.Node, location: Location, words: str) -> Problem:
    mark = _node_at(root, location).start_mark
    return Problem(path_of(location) or "the document", words, mark.line + 1, mark.column + 1)


def _node_at(node: yaml.Node, location: Location) -> yaml.Node:
    """The key or list entry at a location, or the nearest one above it where the document has none."""
    nearest = node
    for part in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = nearest = node.value[part]
            continue
        if not isinstance(node, yaml.MappingNode):
            break
        pair = next(((key, value) for key, value in node.value if key.value == part), None)
        if pair is None:
            break
        nearest, node = pair
    return nearest
