"""Who asks, and whether they may: both are the API server's to say."""

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

from aiohttp import web

from ..apply.api import Api
from .trust import FrontProxy

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_KEEP_S = 10.0
"""As long as Kubernetes' own API servers keep such an answer."""
_MOST_KEPT = 4096
_MOST_TOKEN = 16384

T = TypeVar("T")


@dataclass(frozen=True)
class User:
    """Who asks."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Attributes:
    """What is asked for, in the words of authorization."""

    path: str
    group: str = ""
    version: str = ""
    namespace: str = ""
    resource: str = ""
    """Empty where only the path counts."""
    subresource: str = ""
    name: str = ""
    verb: str = "get"

    def spec(self) -> dict[str, Any]:
        """For a SubjectAccessReview."""
        if not self.resource:
            return {"nonResourceAttributes": {"path": self.path, "verb": self.verb}}
        fields = ("group", "version", "namespace", "resource", "subresource", "name", "verb")
        return {"resourceAttributes": {field: getattr(self, field) for field in fields}}


class _Kept(Generic[T]):
    """Answers of the last seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, T]] = {}

    async def get(self, question: str, ask: Callable[[], Awaitable[T]]) -> T:
        key = hashlib.sha256(question.encode()).hexdigest()
        now = time.monotonic()
        until, answer = self._known.get(key, (0.0, None))
        if answer is None or now >= until:
            answer = await ask()
            if len(self._known) >= _MOST_KEPT:
                self._known = {k: one for k, one in self._known.items() if now < one[0]}
            if len(self._known) < _MOST_KEPT:
                self._known[key] = (now + _KEEP_S, answer)
        return answer


class Authenticator:
    """The user of a request: named by the aggregator, or the bearer of a token."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: _Kept[tuple[User | None]] = _Kept()

    async def user(self, request: web.Request, front: FrontProxy) -> User | None:
        """Who asks; None where nobody can tell. Raises ApiError.

        The TLS layer accepts client certificates of the aggregator's authority only.
        """
        name = common_name(request)
        if name is not None and (not front.names or name in front.names):
            return named_by_headers(request, front)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > _MOST_TOKEN:
            return None
        (user,) = await self._kept.get(token, lambda: self._review(token))
        return user

    async def _review(self, token: str) -> tuple[User | None]:
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
        answer = await self._api.create(TOKEN_REVIEWS, {**kind, "spec": {"token": token}})
        status = answer.get("status", {})
        if not status.get("authenticated"):
            return (None,)
        user = status["user"]
        extra = tuple((key, tuple(values)) for key, values in user.get("extra", {}).items())
        return (User(user["username"], tuple(user.get("groups", ())), user.get("uid", ""), extra),)


class Authorizer:
    """Whether a user may; the API server decides."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept: _Kept[tuple[bool, str]] = _Kept()

    async def allows(self, user: User, attributes: Attributes) -> tuple[bool, str]:
        """The answer and its reason. Raises ApiError."""
        spec = {
            "user": user.name,
            "groups": list(user.groups),
            "uid": user.uid,
            "extra": {key: list(values) for key, values in user.extra},
            **attributes.spec(),
        }

        async def ask() -> tuple[bool, str]:
            kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
            answer = await self._api.create(ACCESS_REVIEWS, {**kind, "spec": spec})
            status = answer.get("status", {})
            return bool(status.get("allowed")) and not status.get("denied"), str(status.get("reason", ""))

        return await self._kept.get(json.dumps(spec, sort_keys=True), ask)


def common_name(request: web.Request) -> str | None:
    """Of the client's certificate; None without one."""
    found = request.get_extra_info("peercert") or {}
    for part in found.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None


def named_by_headers(request: web.Request, front: FrontProxy) -> User | None:
    """The user that the aggregator names; None where it names none."""
    name = next((request.headers[one] for one in front.user_headers if request.headers.get(one)), None)
    if name is None:
        return None
    groups = tuple(value for one in front.group_headers for value in request.headers.getall(one, []))
    return User(name, groups, extra=_extra(request.headers.items(), front.extra_prefixes))


def _extra(
    headers: Iterable[tuple[str, str]], prefixes: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, list[str]] = {}
    for header, value in headers:
        for prefix in prefixes:
            if header.lower().startswith(prefix.lower()):
                found.setdefault(unquote(header[len(prefix) :].lower()), []).append(value)
    return tuple((key, tuple(values)) for key, values in sorted(found.items()))
