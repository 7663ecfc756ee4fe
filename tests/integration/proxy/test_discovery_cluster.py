"""The proxy finds its instances through a real API server."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from epd_proxy.app import Proxy
from epd_proxy.config import Config, Services
from tests.cluster.fixtures import Namespace
from tests.integration.proxy.harness import Setup, image, serving, text, until
from tests.integration.proxy.scripted import (
    ANSWER,
    DONE,
    ROLE,
    Engine,
    decode,
    encode,
    event,
    prefill,
    start_stream,
)

GROUP = "discovery.k8s.io"


def own_address() -> str:
    """An address of this machine that may stand in an EndpointSlice: the loopback ones may not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # chooses an address and sends nothing
            address = str(probe.getsockname()[0])
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this machine has no address but the loopback one, which EndpointSlices refuse")
    return address


class Kube:
    """Objects of one namespace, made as controllers or people make them."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.core = client.CoreV1Api(namespace.client)
        self._objects = client.CustomObjectsApi(namespace.client)
        served = [one.version for one in client.DiscoveryApi(namespace.client).get_api_group().versions]
        self._version = "v1" if "v1" in served else "v1beta1"

    def put_slice(self, role: str, engine: Engine, *, ready: bool = True) -> None:
        """One slice for each engine, since each has a port of its own."""
        name, where = f"{role}-{engine.port}", (GROUP, self._version, self.namespace.name, "endpointslices")
        body: dict[str, Any] = {
            "apiVersion": f"{GROUP}/{self._version}",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": f"d-{role}"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "protocol": "TCP", "port": engine.port}],
            "endpoints": [{"addresses": [engine.host], "conditions": {"ready": ready}}],
        }
        try:
            self._objects.create_namespaced_custom_object(*where, body)
        except ApiException as error:
            if error.status != 409:
                raise
            self._objects.patch_namespaced_custom_object(*where, name, body)

    def delete_slice(self, role: str, engine: Engine) -> None:
        self._objects.delete_namespaced_custom_object(
            GROUP, self._version, self.namespace.name, "endpointslices", f"{role}-{engine.port}"
        )

    def create_service(self, role: str) -> None:
        port = {"name": "http", "port": 8000, "targetPort": "http"}
        spec = {"clusterIP": "None", "selector": {"app": f"d-{role}"}, "ports": [port]}
        self.core.create_namespaced_service(
            self.namespace.name, {"metadata": {"name": f"d-{role}"}, "spec": spec}
        )

    def run_pod(self, role: str, engine: Engine, node: str) -> str:
        """A pod as it looks while a kubelet runs it: bound, with an address, ready. Its name."""
        name = f"d-{role}-{engine.port}"
        port = {"name": "http", "containerPort": engine.port}
        container = {"name": "engine", "image": "localhost/none", "ports": [port]}
        spec = {"nodeName": node, "containers": [container], "automountServiceAccountToken": False}
        metadata = {"name": name, "labels": {"app": f"d-{role}"}}
        self.core.create_namespaced_pod(self.namespace.name, {"metadata": metadata, "spec": spec})
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": engine.host, "podIPs": [{"ip": engine.host}]}
        self.core.patch_namespaced_pod_status(
            name, self.namespace.name, {"status": {**status, "conditions": [ready]}}
        )
        return name

    def has_account(self) -> bool:
        accounts = self.core.list_namespaced_service_account(self.namespace.name).items
        return any(one.metadata.name == "default" and one.secrets for one in accounts)


@pytest.fixture
def kube(namespace: Namespace) -> Kube:
    return Kube(namespace)


@pytest.fixture
def node(kube: Kube) -> Iterator[str]:
    """A node that nobody runs: the EndpointSlice controller wants one to exist."""
    name = f"node-{kube.namespace.name}"
    kube.core.create_node({"metadata": {"name": name}})
    yield name
    kube.core.delete_node(name)


@pytest.fixture
async def engines() -> AsyncIterator[Callable[..., Any]]:
    """Starts a scripted engine at an address that slices may hold."""
    async with AsyncExitStack() as stack:

        async def start(behaviour: Any) -> Engine:
            engine = Engine(behaviour, own_address())
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield start


@pytest.fixture
async def following(kube: Kube, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setup]:
    """A proxy that follows the Services `d-encoder` and `d-pd` of the namespace, which are not there yet."""
    monkeypatch.setenv("KUBECONFIG", str(kube.namespace.cluster.kubeconfig))
    async for running in proxy_for(kube):
        yield running


async def proxy_for(kube: Kube, *roles: str) -> AsyncIterator[Setup]:
    names = {role: f"d-{role}" for role in roles or ("encoder", "pd")}
    proxy = Proxy(Config(services=Services(kube.namespace.name, names)))
    async with serving(proxy) as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield Setup(proxy, http, [], [])


async def listed(s: Setup, role: str) -> list[str]:
    return [one["url"] for one in (await s.client.get("/ready")).json()["roles"][role] if one["ready"]]


async def until_listed(s: Setup, role: str, *engines: Engine) -> None:
    async def seen() -> bool:
        return sorted(await listed(s, role)) == sorted(engine.url for engine in engines)

    await until(seen)


async def test_instances_come_and_go_with_slices(following: Setup, kube: Kube, engines):
    s = following
    assert (await s.client.get("/ready")).status_code == 503
    assert (await s.chat(text("hi"))).status_code == 503
    encoder, first, second = [await engines(one) for one in (encode, decode, decode)]
    kube.put_slice("pd", first)
    kube.put_slice("pd", second, ready=False)
    await until_listed(s, "pd", first)
    assert (await s.client.get("/ready")).status_code == 200
    assert (await s.chat(text("hi"))).content == ANSWER
    assert (await s.chat(image("a"))).status_code == 503

    kube.put_slice("encoder", encoder)
    await until_listed(s, "encoder", encoder)
    assert (await s.chat(image("a"))).content == ANSWER

    kube.put_slice("pd", second)
    await until_listed(s, "pd", first, second)
    kube.put_slice("pd", first, ready=False)
    await until_listed(s, "pd", second)
    calls = len(first.calls)
    assert (await s.chat(text("hi"))).content == ANSWER
    assert (len(first.calls), len(second.calls)) == (calls, 1)
    kube.delete_slice("pd", second)
    await until_listed(s, "pd")
    assert await s.metric('epd_proxy_instances{role="pd"}') == 0
    assert await s.metric('epd_proxy_instances_ready{role="encoder"}') == 1
    assert await s.metric("epd_proxy_watch_up") == 1


async def test_prefill_and_decode_are_found_each_by_its_service(
    kube: Kube, engines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KUBECONFIG", str(kube.namespace.cluster.kubeconfig))
    first, second = await engines(prefill), await engines(decode)
    async for s in proxy_for(kube, "encoder", "prefill", "decode"):
        kube.put_slice("prefill", first)
        await until_listed(s, "prefill", first)
        assert (await s.client.get("/ready")).status_code == 503
        kube.put_slice("decode", second)
        await until_listed(s, "decode", second)
        assert (await s.chat(text("hi"))).content == ANSWER
        assert [len(one.calls) for one in (first, second)] == [1, 1]


async def test_a_pod_that_is_deleted_gets_no_new_work_and_finishes_its_streams(
    following: Setup, kube: Kube, engines, node: str
):
    """With the real EndpointSlice controller over pods and Services."""
    s = following
    await until(lambda: asyncio.to_thread(kube.has_account))
    gate = asyncio.Event()

    async def slowly(call: Any) -> Any:
        response = await start_stream(call)
        await response.write(ROLE + event(content="s"))
        await gate.wait()
        await response.write(DONE)
        return response

    old, new = await engines(slowly), await engines(decode)
    kube.create_service("pd")
    name = kube.run_pod("pd", old, node)
    await until_listed(s, "pd", old)
    request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with s.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == ROLE + event(content="s")
        kube.run_pod("pd", new, node)
        await until_listed(s, "pd", old, new)
        # No kubelet ends it, so it stays as a pod does that drains.
        kube.core.delete_namespaced_pod(name, kube.namespace.name, grace_period_seconds=300)
        await until_listed(s, "pd", new)
        assert (await s.chat(text("hi"))).content == ANSWER
        assert (len(old.calls), len(new.calls)) == (1, 1)
        gate.set()
        assert b"".join([piece async for piece in pieces]) == DONE


async def test_the_api_server_is_restarted_under_the_proxy(following: Setup, kube: Kube, engines):
    s = following
    first, second = await engines(decode), await engines(decode)
    kube.put_slice("pd", first)
    await until_listed(s, "pd", first)
    cluster = kube.namespace.cluster
    await asyncio.to_thread(cluster.stop_apiserver)
    try:

        async def lost() -> bool:
            return await s.metric("epd_proxy_watch_up") == 0

        await until(lost)
        assert (await s.chat(text("hi"))).content == ANSWER
        assert await listed(s, "pd") == [first.url]
    finally:
        await asyncio.to_thread(cluster.start_apiserver)
    kube.put_slice("pd", second)
    await until_listed(s, "pd", first, second)
    kube.delete_slice("pd", first)
    await until_listed(s, "pd", second)


async def test_in_a_pod_the_service_account_and_its_role_are_enough(
    kube: Kube, engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await until(lambda: asyncio.to_thread(kube.has_account))
    engine = await engines(decode)
    kube.put_slice("pd", engine)
    _grant(kube)
    _enter_pod(kube, tmp_path, monkeypatch)
    async for s in proxy_for(kube):
        await until_listed(s, "pd", engine)
        assert await s.metric("epd_proxy_watch_up") == 1
        assert await s.metric('epd_proxy_watch_restarts_total{reason="refused"}') == 0


def _grant(kube: Kube) -> None:
    """What the operator renders for the proxy."""
    where, rbac = kube.namespace.name, client.RbacAuthorizationV1Api(kube.namespace.client)
    rule = {"apiGroups": [GROUP], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    rbac.create_namespaced_role(where, {"metadata": {"name": "proxy"}, "rules": [rule]})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "proxy"}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": where}
    rbac.create_namespaced_role_binding(
        where, {"metadata": {"name": "proxy"}, "roleRef": role, "subjects": [subject]}
    )


def _enter_pod(kube: Kube, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and variables as the kubelet gives them to a pod of the namespace's account."""
    secrets = kube.core.list_namespaced_secret(kube.namespace.name).items
    held = next(one.data for one in secrets if one.type == "kubernetes.io/service-account-token")
    for name, setting in (("token", "SERVICE_TOKEN_FILENAME"), ("ca.crt", "SERVICE_CERT_FILENAME")):
        (folder / name).write_bytes(base64.b64decode(held[name]))
        monkeypatch.setattr(f"kubernetes.aio.config.incluster_config.{setting}", str(folder / name))
    server = httpx.URL(kube.namespace.client.configuration.host)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server.host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
