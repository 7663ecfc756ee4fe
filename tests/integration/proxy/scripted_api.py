"""A scripted API server: lists and watches EndpointSlices, and misbehaves as a real one cannot be made to."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web


class ApiServer:
    """One namespace of slices. `versions` are those served; the rest is what goes wrong."""

    def __init__(self) -> None:
        self.versions = ["v1", "v1beta1"]
        self.slices: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        """Of slices, in order: `list` or `watch VERSION`."""
        self.watches_refused: list[int] = []
        """Statuses for the next watches."""
        self.silent = False
        self._version = 100
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._streams: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/apis/discovery.k8s.io/", self._group)
        app.router.add_get("/apis/discovery.k8s.io/{version}/namespaces/models/endpointslices", self._slices)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, path: Path) -> Path:
        named = {"name": "here"}
        config = {
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{**named, "user": {"token": "t"}}],
            "contexts": [{**named, "context": {"cluster": "here", "user": "here"}}],
            "current-context": "here",
        }
        path.write_text(json.dumps(config))
        return path

    async def put(self, name: str, service: str, *addresses: str, quietly: bool = False) -> None:
        """Make or change a slice; `quietly`, as if the event were lost on its way."""
        known = name in self.slices
        self._version += 1
        changed = {
            "metadata": {
                "name": name,
                "labels": {"kubernetes.io/service-name": service},
                "resourceVersion": str(self._version),
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            "endpoints": [{"addresses": [one], "conditions": {"ready": True}} for one in addresses],
        }
        self.slices[name] = changed
        if not quietly:
            await self._tell("MODIFIED" if known else "ADDED", changed)

    async def delete(self, name: str) -> None:
        self._version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self._version)
        await self._tell("DELETED", gone)

    async def fail_watches(self, status: int) -> None:
        """End each watch with an error event."""
        await self._tell("ERROR", {"kind": "Status", "code": status, "message": f"scripted {status}"})

    def cut(self) -> None:
        """Reset the connection of every watch."""
        for stream in tuple(self._streams):
            assert stream._req is not None
            assert stream._req.transport is not None
            stream._req.transport.abort()

    async def _tell(self, kind: str, thing: dict[str, Any]) -> None:
        async with self._changed:
            self._events.append((self._version, {"type": kind, "object": thing}))
            self._changed.notify_all()

    async def _group(self, _: web.Request) -> web.Response:
        versions = [{"groupVersion": f"discovery.k8s.io/{one}", "version": one} for one in self.versions]
        body = {"kind": "APIGroup", "apiVersion": "v1", "name": "discovery.k8s.io", "versions": versions}
        return web.json_response(body | {"preferredVersion": versions[0], "serverAddressByClientCIDRs": []})

    async def _slices(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["version"] not in self.versions:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        assert request.query["labelSelector"] == "kubernetes.io/service-name in (d-pd,d-encoder)"
        if request.query.get("watch") not in ("true", "True", "1"):
            self.requests.append("list")
            version = {"resourceVersion": str(self._version)}
            return web.json_response({"metadata": version, "items": list(self.slices.values())})
        self.requests.append(f"watch {request.query['resourceVersion']}")
        if self.watches_refused:
            status = self.watches_refused.pop(0)
            return web.json_response({"kind": "Status", "message": "scripted"}, status=status)
        return await self._watch(request, int(request.query["resourceVersion"]))

    async def _watch(self, request: web.Request, since: int) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = sum(version <= since for version, _ in self._events)
        self._streams.add(response)
        try:
            async with asyncio.timeout(None if self.silent else int(request.query["timeoutSeconds"])):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(partial(self._has_more_than, sent))
                        event = self._events[sent][1]
                    sent += 1
                    await response.write(json.dumps(event).encode() + b"\n")
                    if event["type"] == "ERROR":
                        break
        except TimeoutError:
            pass
        finally:
            self._streams.discard(response)
        return response

    def _has_more_than(self, sent: int) -> bool:
        return len(self._events) > sent and not self.silent
