"""Which pods there are: one list, then a watch, for as long as the adapter runs."""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from ..apply.kinds import POD
from ..render.labels import COMPONENT_LABEL, INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL
from ..render.pods import PORT
from .signals import pod_signals

Object = Mapping[str, Any]
log = logging.getLogger(__name__)

REVISION_LABEL = "pod-template-hash"
"""Kubernetes' own, of what a Deployment makes."""
_WATCH_S = 240
_RETRY_S = 1.0
_CONNECT_S = 10.0
_MOST_LINE = 4 << 20
_SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"


@dataclass(frozen=True)
class Pod:
    """A pod that has signals, as far as they are concerned."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    address: str

    @property
    def deployment(self) -> str:
        """The name of its EPDDeployment."""
        return self.labels[INSTANCE_LABEL]

    @property
    def component(self) -> str:
        """Its role, or `proxy`."""
        return self.labels[COMPONENT_LABEL]

    @property
    def url(self) -> str:
        """Where its metrics are."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{PORT}/metrics"

    @property
    def series_labels(self) -> Mapping[str, str]:
        """The labels that its metrics have in the metrics API, and in Prometheus."""
        return {
            "namespace": self.namespace,
            "deployment": self.deployment,
            "role": self.component,
            "revision": self.labels.get(REVISION_LABEL, ""),
        }


def pod_of(found: Object) -> Pod | None:
    """A pod that may be asked; None for one that is ending, over, not begun, or has no signals."""
    metadata, status = found["metadata"], found.get("status", {})
    labels = metadata.get("labels", {})
    address = status.get("podIP")
    if metadata.get("deletionTimestamp") is not None or status.get("phase") != "Running" or not address:
        return None
    if INSTANCE_LABEL not in labels or not any(pod_signals(labels.get(COMPONENT_LABEL, ""))):
        return None
    return Pod(metadata["namespace"], metadata["name"], metadata["uid"], labels, address)


class PodWatch:
    """The pods of all EPDDeployments, in some namespaces or in all.

    While the API server is away the last known pods stay: they are asked directly, and answer or do not.
    """

    def __init__(self, session: aiohttp.ClientSession, server: str, namespaces: Iterable[str]) -> None:
        self._session = session
        self._server = server
        self._known: dict[str | None, dict[str, Pod]] = {}
        self._scopes: list[str | None] = [*namespaces] or [None]
        self._complete = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether everything has been listed once."""
        return self._complete.is_set()

    async def wait_complete(self) -> None:
        """Until everything has been listed once."""
        await self._complete.wait()

    def pods(self) -> list[Pod]:
        """All of them, by namespace and name."""
        found = [pod for pods in self._known.values() for pod in pods.values()]
        return sorted(found, key=lambda pod: (pod.namespace, pod.name))

    async def run(self) -> None:
        """Follows all scopes until cancelled."""
        async with asyncio.TaskGroup() as group:
            for scope in self._scopes:
                group.create_task(self._follow(scope))

    async def _follow(self, scope: str | None) -> None:
        url = self._server + POD.collection(scope)
        version: str | None = None
        while True:
            try:
                if version is None:
                    version = await self._list(url, scope)
                version = await self._watch(url, scope, version)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
                log.warning("pods are not followed", extra={"error": repr(error)})
                version = None
                await asyncio.sleep(_RETRY_S)

    async def _list(self, url: str, scope: str | None) -> str:
        # From the API server's memory, which is as new as a watch is.
        query = {"labelSelector": _SELECTOR, "resourceVersion": "0"}
        timeout = aiohttp.ClientTimeout(total=60, sock_connect=_CONNECT_S)
        async with self._session.get(
            url, params=query, timeout=timeout, headers={"Accept": "application/json"}
        ) as response:
            response.raise_for_status()
            found = json.loads(await response.read())
        pods = (pod_of(one) for one in found["items"])
        self._known[scope] = {pod.uid: pod for pod in pods if pod is not None}
        if len(self._known) == len(self._scopes):
            self._complete.set()
        return str(found["metadata"]["resourceVersion"])

    async def _watch(self, url: str, scope: str | None, version: str) -> str | None:
        """Follows changes until the API server ends the watch; from where to go on, or None: list again."""
        query = {
            "labelSelector": _SELECTOR,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        # One that says nothing for longer than it may live is dead.
        timeout = aiohttp.ClientTimeout(total=_WATCH_S + 30, sock_connect=_CONNECT_S)
        async with self._session.get(url, params=query, timeout=timeout, read_bufsize=_MOST_LINE) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    log.info("pods are listed again", extra={"reason": event["object"].get("message")})
                    return None
                found = event["object"]
                version = str(found["metadata"]["resourceVersion"])
                if event["type"] != "BOOKMARK":
                    self._take(scope, event["type"], found)
        return version

    def _take(self, scope: str | None, kind: str, found: Object) -> None:
        pods = self._known[scope]
        pod = None if kind == "DELETED" else pod_of(found)
        if pod is None:
            pods.pop(found["metadata"]["uid"], None)
        else:
            pods[pod.uid] = pod
