"""kopf: its watches fill the cache. Its handlers do no more than that.

Only `on.event` handlers: kopf's timers, daemons and change handlers put a finalizer on each object, and then
nothing could be deleted while the operator is down.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import kopf

from ..apply.kinds import AUTOSCALER, RESOURCE, Kind
from ..render.labels import MANAGED_BY, MANAGED_BY_LABEL
from .access import Access, Page
from .cache import Cache, Key, nobodys
from .health import Health

PREFIX = "epd.dev"
_WATCHES_A_STALL = 2.5
"""A watch that was begun just after the last look must not look dead, even when it is begun anew late."""
_WORKERS = 64
_IDLE_S = 0.05
_RETRY_S = 1.0
_PAGE = 100


class _NoMemory(kopf.DiffBaseStorage):  # type: ignore[misc]
    """Remembers no former state of objects: to do so kopf would copy each object at each event."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


class Watches:
    """What kopf and the requests underneath it tell us, put where reconciling finds it."""

    def __init__(
        self,
        cache: Cache,
        health: Health,
        kinds: Iterable[Kind],
        namespaces: Iterable[str],
        changed: Callable[[Key], None],
        known: Callable[[], None],
    ) -> None:
        """`changed` is called for each resource about which something changed, `known` once all is listed."""
        self._cache = cache
        self._health = health
        self._changed = changed
        self._known = known
        scopes: list[str | None] = [*namespaces] or [None]
        self._kinds = [RESOURCE, *kinds]
        self._collections: Mapping[str, tuple[Kind, str | None]] = {
            kind.collection(scope): (kind, scope) for kind in self._kinds for scope in scopes
        }
        self._listing: dict[str, set[tuple[str, str]]] = {}
        health.expect(self._collections)

    def listed(self, path: str, page: Page) -> None:
        """A page of a list has come: at the start, or when a watch had lost its place."""
        if path not in self._collections:
            return
        kind, scope = self._collections[path]
        if page.is_first:
            self._listing[path] = set()
        for found in page.items:
            metadata = found["metadata"]
            self._listing[path].add((metadata["namespace"], metadata["name"]))
            self._tell(self._cache.put(kind, found))
        if page.is_last:
            for key in self._cache.retain(kind, scope, self._listing.pop(path)):
                self._tell(key)
            self._health.listed.add(path)
            if not self._health.unready():
                self._known()

    def watching(self, path: str) -> None:
        """A watch has begun."""
        if path in self._collections:
            self._health.watched[path] = self._health.clock()

    def registry(self, access: Access) -> kopf.OperatorRegistry:
        """The handlers."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(access.login)
        for kind in self._kinds:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def observe(event: Mapping[str, Any], **_: Any) -> None:
            gone = event["type"] == "DELETED"
            found = event["object"]
            self._tell(self._cache.remove(kind, found) if gone else self._cache.put(kind, found))

        return observe

    def _tell(self, key: Key | None) -> None:
        if key is None:
            return
        if key != nobodys(key.namespace):
            self._changed(key)
            return
        # It may concern each resource of the namespace.
        for one in list(self._cache.resources()):
            if one.namespace == key.namespace:
                self._changed(one)


def kopf_settings(kinds: Iterable[Kind], stall_s: float) -> kopf.OperatorSettings:
    """Settings under which kopf writes nothing, keeps little, and never gives a watch up."""
    settings = kopf.OperatorSettings()
    settings.persistence.finalizer = f"{PREFIX}/operator"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    settings.persistence.diffbase_storage = _NoMemory()
    settings.posting.enabled = False
    # No watches of namespaces and definitions: the operator may have no right to them.
    settings.scanning.disabled = True
    settings.queueing.worker_limit = _WORKERS
    settings.queueing.idle_timeout = _IDLE_S
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = itertools.repeat(_RETRY_S)
    # A whole list of a large cluster, as JSON and as Python objects, is more than all else in memory.
    settings.watching.chunk_size = _PAGE
    settings.watching.server_timeout = max(1, round(stall_s / _WATCHES_A_STALL))
    settings.watching.inactivity_timeout = settings.watching.server_timeout + stall_s / 10
    for kind in kinds:
        if kind.kind == AUTOSCALER:
            continue  # others' matter, too: they may scale what we do
        selector = (kind.group, kind.version, kind.plural)
        settings.watching.label_selectors[selector] = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
    return settings
