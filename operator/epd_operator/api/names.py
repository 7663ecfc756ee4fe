"""Names of children, and label values made of names: always valid, whatever the resource is called."""

import hashlib
import re

LABEL_LENGTH = 63
"""Bound of a DNS label (a Service's name) and of a label's value."""
BASE_LENGTH = 47
"""Bound of a children's common base; what is left is for a dash and a suffix of `SUFFIX_LENGTH`."""
SUFFIX_LENGTH = LABEL_LENGTH - BASE_LENGTH - 1
_HASH_LENGTH = 8
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def base_name(name: str) -> str:
    """What the names of all children of the resource `name` begin with: the name, or its start and a hash.

    The base and not each child is cut, so that all children of a resource begin alike.
    """
    return _fitting(name, BASE_LENGTH)


def child_name(name: str, suffix: str) -> str:
    """The name of one child of the resource `name`: `<name>-<suffix>`, at most 63 characters."""
    if len(suffix) > SUFFIX_LENGTH:
        raise ValueError(f"suffix {suffix!r} is longer than {SUFFIX_LENGTH} characters")
    return f"{base_name(name)}-{suffix}"


def label_value(name: str) -> str:
    """The name as a label's value: at most 63 characters."""
    return _fitting(name, LABEL_LENGTH)


def _fitting(name: str, length: int) -> str:
    if len(name) <= length and _DNS_LABEL.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    start = re.sub(r"[^a-z0-9]+", "-", name.lower())[: length - _HASH_LENGTH - 1].strip("-")
    return f"{start}-{digest}" if start else f"x-{digest}"
