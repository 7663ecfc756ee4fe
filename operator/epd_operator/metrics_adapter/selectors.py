"""Pure: label selectors as Kubernetes writes them in a query."""

import re
from collections.abc import Callable, Mapping

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

_KEY = r"(?:[A-Za-z0-9.-]{1,253}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
_REQUIREMENT = re.compile(
    rf"\s*(?:(?P<not>!)\s*(?P<absent>{_KEY})"
    rf"|(?P<key>{_KEY})\s*(?:(?P<op>==|=|!=)\s*(?P<value>{_VALUE})"
    rf"|\s+(?P<set>in|notin)\s*\(\s*(?P<values>{_VALUE}(?:\s*,\s*{_VALUE})*)\s*\))?)\s*(?:,|$)"
)
_MOST_CHARACTERS = 16384


def parse_selector(text: str) -> Selector:
    """Whether labels are selected: `a=b, c!=d, e in (f, g), h notin (i), j, !k`; all of it must hold.

    Raises ValueError for what is no selector.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"a selector of more than {_MOST_CHARACTERS} characters")
    requirements, position = [], 0
    while text.strip() and position < len(text):
        found = _REQUIREMENT.match(text, position)
        if found is None:
            raise ValueError(f"no label selector from {text[position:]!r} on")
        requirements.append(_requirement(found))
        position = found.end()
    if text.rstrip().endswith(","):
        raise ValueError(f"{text!r} ends in a comma")
    return lambda labels: all(holds(labels) for holds in requirements)


def _requirement(found: re.Match[str]) -> Selector:
    if found["not"]:
        absent = found["absent"]
        return lambda labels: absent not in labels
    key = found["key"]
    if found["op"] is None and found["set"] is None:
        return lambda labels: key in labels
    if found["op"] is not None:
        values, wanted = {found["value"]}, found["op"] != "!="
    else:
        values = {value.strip() for value in found["values"].split(",")}
        wanted = found["set"] == "in"
    if wanted:
        return lambda labels: labels.get(key) in values
    return lambda labels: labels.get(key) not in values
