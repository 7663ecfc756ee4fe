"""EndpointSlices of a namespace from the API server: one list, one watch.

The `kubernetes` package costs 20 MB and half a second, so it is loaded only by a proxy that asks an API
server. Slices are read as plain objects: the package's models know no `v1beta1`, which clusters before 1.21
have alone.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from epd_proxy.slices import SERVICE_LABEL, Slice

GROUP = "discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")
"""Those that we read, the preferred one first."""

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiFault(Exception):
    """The API server refused, or said what is no answer. `status` is HTTP's; 410: that version is too old."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status


def own_namespace() -> str | None:
    """The namespace of the pod that this process runs in, if it does."""
    try:
        return _OWN_NAMESPACE.read_text().strip() or None
    except OSError:
        return None


class EndpointSlices:
    """The slices of some Services, over one connection pool."""

    def __init__(self, client: Any, namespace: str, services: Sequence[str]) -> None:
        from kubernetes.aio.client import CustomObjectsApi, DiscoveryApi

        self._groups = DiscoveryApi(client)
        self._objects = CustomObjectsApi(client)
        self._selector = f"{SERVICE_LABEL} in ({','.join(services)})"
        self._namespace = namespace
        self._version = ""

    async def list(self) -> tuple[list[Slice], str]:
        """All slices, and the version to watch from."""
        self._version = await self._served_version()
        answer = await self._get()
        page = orjson.loads(await answer.read())
        _check(answer.status, page)
        return page["items"], page["metadata"]["resourceVersion"]

    async def watch(self, version: str, seconds: int) -> AsyncGenerator[tuple[str, Slice]]:
        """Changes after `version`, as event type and object, until the API server ends it after `seconds`."""
        answer = await self._get(
            watch=True, resource_version=version, timeout_seconds=seconds, allow_watch_bookmarks=True
        )
        try:
            if answer.status != 200:
                _check(answer.status, orjson.loads(await answer.read()))
            while line := await answer.content.readline():
                event = orjson.loads(line)
                if event["type"] == "ERROR":
                    _check(int(event["object"].get("code", 500)), event["object"])
                yield event["type"], event["object"]
        finally:
            answer.close()

    async def _get(self, **options: Any) -> Any:
        return await self._objects.list_namespaced_custom_object_without_preload_content(
            GROUP,
            self._version,
            self._namespace,
            "endpointslices",
            label_selector=self._selector,
            **options,
        )

    async def _served_version(self) -> str:
        group = await self._groups.get_api_group()
        served = [one.version for one in group.versions]
        for version in VERSIONS:
            if version in served:
                return version
        raise ApiFault(404, f"{GROUP} is served as {', '.join(served)} only")


Connect = Callable[[], AbstractAsyncContextManager[EndpointSlices]]


def connector(namespace: str, services: Sequence[str]) -> Connect:
    """Makes connections to the API server. Loads the package, which is better done before anybody waits."""
    import kubernetes.aio.config  # noqa: F401
    from kubernetes.aio.client import CustomObjectsApi, DiscoveryApi, V1APIGroup  # noqa: F401

    return partial(_connect, namespace, services)


@asynccontextmanager
async def _connect(namespace: str, services: Sequence[str]) -> AsyncIterator[EndpointSlices]:
    """A new client, so that what it reads (tokens, authorities, a kubeconfig) is as new.

    `KUBECONFIG` where it is set, else the pod's service account, whose token the package reads again each
    minute.
    """
    from kubernetes.aio import config
    from kubernetes.aio.client import ApiClient, Configuration

    configuration = Configuration()
    if kubeconfig := os.environ.get("KUBECONFIG"):
        await config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        config.load_incluster_config(configuration)
    async with ApiClient(configuration) as client:
        yield EndpointSlices(client, namespace, services)


def _check(status: int, said: Any) -> None:
    if status != 200:
        message = said.get("message") if isinstance(said, dict) else None
        raise ApiFault(status, str(message or "no reason given"))
