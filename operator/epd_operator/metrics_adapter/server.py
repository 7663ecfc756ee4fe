"""The HTTP side: from a request to the objects that answer it."""

import logging
import time
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from ..apply.api import ApiError
from .access import Attributes, Authenticator, Authorizer
from .objects import (
    CUSTOM,
    EXTERNAL,
    VERSIONS,
    Object,
    api_group,
    api_groups,
    external_metrics,
    failure,
    pod_metrics,
    resources,
)
from .readings import Readings
from .selectors import Selector, parse_selector
from .signals import BY_NAME, Signal
from .trust import FrontProxy

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN = frozenset({"/healthz", "/livez", "/readyz"})


class Failure(Exception):
    """A request that is answered with a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def response(self) -> web.Response:
        return web.json_response(failure(self.code, self.reason, str(self)), status=self.code)


class MetricsApi:
    """The aggregated API server's requests."""

    def __init__(
        self,
        readings: Readings,
        authenticator: Authenticator,
        authorizer: Authorizer,
        front: Callable[[], FrontProxy],
        unready: Callable[[], list[str]],
        groups: tuple[str, ...] = (CUSTOM, EXTERNAL),
    ) -> None:
        """`front` is whom the API server trusts now; `unready` says what is not known yet."""
        self._readings = readings
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._front = front
        self._unready = unready
        self._groups = groups

    def application(self) -> web.Application:
        """For a server that asks for client certificates."""
        application = web.Application(middlewares=[self._guarded])
        application.router.add_route("*", "/{path:.*}", self._serve)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who is unknown gets 401, who may not 403, and every failure a Status."""
        try:
            if _path(request) not in _OPEN:
                await self._admit(request)
            return await handler(request)
        except Failure as failed:
            return failed.response()
        except ApiError as error:
            log.warning("nobody can tell who may", extra={"error": str(error)})
            return Failure(503, "ServiceUnavailable", f"the API server cannot be asked: {error}").response()

    async def _admit(self, request: web.Request) -> None:
        user = await self._authenticator.user(request, self._front())
        if user is None:
            raise Failure(401, "Unauthorized", "Unauthorized")
        attributes = attributes_of(request.method, _path(request))
        allowed, reason = await self._authorizer.allows(user, attributes)
        if not allowed:
            what = f"{attributes.resource}/{attributes.subresource}".strip("/") or request.path
            where = f' in the namespace "{attributes.namespace}"' if attributes.namespace else ""
            message = f'{what} is forbidden: User "{user.name}" cannot {attributes.verb} it{where}: {reason}'
            raise Failure(403, "Forbidden", message.rstrip(": "))

    async def _serve(self, request: web.Request) -> web.Response:
        path = _path(request)
        if path in _OPEN:
            unready = self._unready()
            return web.Response(status=503 if unready else 200, text="\n".join(unready) or "ok")
        if request.method not in ("GET", "HEAD"):
            raise Failure(405, "MethodNotAllowed", "metrics can only be read")
        return web.json_response(
            self._answer(request, [unquote(part) for part in path.strip("/").split("/")])
        )

    def _answer(self, request: web.Request, parts: list[str]) -> Object:
        match parts:
            case ["apis"]:
                return api_groups(self._groups)
            case ["apis", group] if group in self._groups:
                return api_group(group)
            case ["apis", group, version] if group in self._groups and version in VERSIONS[group]:
                return resources(group, version)
            case ["apis", group, version, "namespaces", namespace, *rest] if (
                group in self._groups and version in VERSIONS[group]
            ):
                if group == EXTERNAL:
                    return self._external(request, namespace, rest)
                return self._custom(request, version, namespace, rest)
        raise Failure(404, "NotFound", "the server could not find the requested resource")

    def _custom(self, request: web.Request, version: str, namespace: str, rest: list[str]) -> Object:
        self._must_be_ready()
        if len(rest) != 3:
            raise Failure(404, "NotFound", "metrics are at namespaces/NAMESPACE/pods/NAME/METRIC")
        resource, name, metric = rest
        signal = BY_NAME.get(metric)
        if signal is None or resource != "pods" or signal.component is not None:
            raise _no_metric(metric, resource)
        wanted = _selector(request, "labelSelector")
        series = _selector(request, "metricLabelSelector")
        found = [
            (pod, reading)
            for pod, reading in self._readings.of_pods(namespace, signal, time.time())
            if (pod.name == name if name != "*" else wanted(pod.labels)) and series(reading.labels)
        ]
        if name != "*" and not found:
            raise _no_metric(metric, resource, name)
        return pod_metrics(version, metric, found)

    def _external(self, request: web.Request, namespace: str, rest: list[str]) -> Object:
        self._must_be_ready()
        signal: Signal | None = BY_NAME.get(rest[0]) if len(rest) == 1 else None
        if signal is None:
            raise _no_metric("/".join(rest), "external metrics")
        wanted = _selector(request, "labelSelector")
        found = self._readings.of_roles(namespace, signal, time.time())
        return external_metrics(signal.name, [one for one in found if wanted(one.labels)])

    def _must_be_ready(self) -> None:
        """Before all pods are known, some would look as if they had no metrics."""
        unready = self._unready()
        if unready:
            raise Failure(503, "ServiceUnavailable", "; ".join(unready))


def _path(request: web.Request) -> str:
    """As it came: a slash within a name is not one between names."""
    return request.raw_path.partition("?")[0]


def attributes_of(method: str, raw_path: str) -> Attributes:
    """What a path asks for, as Kubernetes understands it."""
    verb = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}.get(
        method, method.lower()
    )
    match [unquote(part) for part in raw_path.strip("/").split("/")]:
        case ["apis", group, version, "namespaces", namespace, resource, name, *below] if below:
            return Attributes(raw_path, group, version, namespace, resource, below[0], name, verb)
        case ["apis", group, version, "namespaces", namespace, resource, name]:
            return Attributes(raw_path, group, version, namespace, resource, "", name, verb)
        case ["apis", group, version, "namespaces", namespace, resource]:
            listed = "list" if verb == "get" else verb
            return Attributes(raw_path, group, version, namespace, resource, verb=listed)
        case ["apis", group, version, resource, name, *below] if resource != "namespaces":
            return Attributes(raw_path, group, version, "", resource, "".join(below[:1]), name, verb)
    return Attributes(unquote(raw_path), verb=verb)


def _selector(request: web.Request, parameter: str) -> Selector:
    try:
        return parse_selector(request.query.get(parameter, ""))
    except ValueError as error:
        raise Failure(400, "BadRequest", f"{parameter}: {error}") from None


def _no_metric(metric: str, resource: str, name: str = "") -> Failure:
    where = f"{resource} {name}".strip()
    return Failure(404, "NotFound", f"the server could not find the metric {metric} for {where}")
