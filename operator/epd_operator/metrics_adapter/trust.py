"""Whom the API server lets speak for users: as it says itself, in a ConfigMap that every cluster has."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..apply.api import Api
from ..apply.kinds import Kind

CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
NAMESPACE, NAME = "kube-system", "extension-apiserver-authentication"


@dataclass(frozen=True)
class FrontProxy:
    """The aggregator: whose certificates it has, and in which headers it names the user."""

    authority: str
    """PEM; empty where the cluster has no aggregation layer."""
    names: frozenset[str]
    """Common names that count; empty: all that the authority signed."""
    user_headers: tuple[str, ...]
    group_headers: tuple[str, ...]
    extra_prefixes: tuple[str, ...]


async def read_front_proxy(api: Api) -> FrontProxy:
    """What the API server says now. Raises ApiError; ValueError for what cannot be read."""
    found = await api.get(CONFIG_MAP.path(NAMESPACE, NAME))
    data: Mapping[str, Any] = (found or {}).get("data", {})

    def words(key: str) -> Sequence[str]:
        listed = json.loads(data.get(f"requestheader-{key}", "[]"))
        if not isinstance(listed, list):
            raise ValueError(f"requestheader-{key} is no list")
        return [str(one) for one in listed]

    return FrontProxy(
        data.get("requestheader-client-ca-file", ""),
        frozenset(words("allowed-names")),
        tuple(words("username-headers")),
        tuple(words("group-headers")),
        tuple(words("extra-headers-prefix")),
    )
