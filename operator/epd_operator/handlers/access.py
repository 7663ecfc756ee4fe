"""Who we are to the API server, and one place through which every request goes.

kopf and our own client use sessions made here. So each request carries credentials that are fresh, is
counted, and is seen by `Listener`: kopf tells its handlers neither that a list is complete nor what is not
in it.
"""

import asyncio
import dataclasses
import os
from typing import Any, NamedTuple, Protocol

import aiohttp
import kopf
from prometheus_client import Counter

_UNAUTHORIZED = 401
_UNAUTHORIZED_PAUSE_S = 2.0
_CREDENTIALS_AGE_S = 30.0
"""Tokens in files are replaced long before they expire."""


class Listener(Protocol):
    """Learns of the requests that keep a cache true."""

    def listed(self, path: str, page: "Page") -> None:
        """A page of the list of all objects at a path has come."""

    def watching(self, path: str) -> None:
        """The API server has agreed to report changes at a path."""


class Call(NamedTuple):
    """What a request is, in the words of Kubernetes."""

    verb: str
    resource: str


class Page(NamedTuple):
    """A part of a list."""

    items: list[dict[str, Any]]
    is_first: bool
    is_last: bool


def describe(method: str, path: str, *, watch: bool) -> Call:
    """What a request is, by its method and path."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if len(rest) > 2 and rest[0] == "namespaces":
        rest = rest[2:]
    if not rest or parts[0] not in ("api", "apis"):
        return Call("get", "")
    named = len(rest) > 1
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    reading = "get" if named else "watch" if watch else "list"
    return Call(verbs.get(method, reading), "/".join([rest[0], *rest[2:]]))


class Access:
    """Credentials from the service account or `KUBECONFIG`, read again while the operator runs.

    Raises kopf.LoginError where there are none.
    """

    def __init__(self, requests: Counter) -> None:
        """`requests` counts them, by verb, resource and code."""
        self._requests = requests
        self._listener: Listener | None = None
        self._read_at = 0.0
        self.info = self._read()

    def listen(self, listener: Listener) -> None:
        """Tells a listener of lists and watches from now on."""
        self._listener = listener

    def session(self) -> aiohttp.ClientSession:
        """A new session; whoever asked for it closes it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.info.as_ssl_context()),
            middlewares=[self._pass_through],
            proxy=self.info.proxy_url,
            headers={"User-Agent": "epd-operator"},
        )

    async def login(self, **_: Any) -> kopf.AiohttpSession:
        """kopf's login handler."""
        return kopf.AiohttpSession(
            server=self.info.server,
            aiohttp_session=self.session(),
            default_namespace=self.info.default_namespace,
        )

    def _read(self) -> kopf.ConnectionInfo:
        settings = kopf.OperatorSettings()
        info = kopf.login_with_service_account(settings=settings)
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if info is not None and host:
            # The address works before the cluster's DNS does.
            where = f"[{host}]" if ":" in host else host
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            info = dataclasses.replace(info, server=f"https://{where}:{port}")
        info = info or kopf.login_with_kubeconfig(settings=settings)
        if info is None:
            raise kopf.LoginError("neither in a cluster nor with a KUBECONFIG: no API server is known")
        return info

    def _authorize(self, request: aiohttp.ClientRequest, *, afresh: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        if afresh or now - self._read_at > _CREDENTIALS_AGE_S:
            self.info, self._read_at = self._read(), now
        request.headers.update(self.info.as_http_headers())

    async def _pass_through(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        watch = "watch" in request.url.query
        call = describe(request.method, request.url.path, watch=watch)
        self._authorize(request)
        try:
            response = await handler(request)
            if response.status == _UNAUTHORIZED:
                response.release()
                self._authorize(request, afresh=True)
                response = await handler(request)
            if response.status == _UNAUTHORIZED:
                # kopf logs in and asks again without a pause.
                await asyncio.sleep(_UNAUTHORIZED_PAUSE_S)
        except (aiohttp.ClientError, TimeoutError):
            self._requests.labels(*call, "none").inc()
            raise
        self._requests.labels(*call, str(response.status)).inc()
        if self._listener is not None and response.ok:
            if call.verb == "watch":
                self._listener.watching(request.url.path)
            elif call.verb == "list":
                # aiohttp keeps the body, so whoever asked for the list can still read it.
                found = await response.json()
                is_last = not found["metadata"].get("continue")
                page = Page(found["items"], "continue" not in request.url.query, is_last)
                self._listener.listed(request.url.path, page)
        return response
