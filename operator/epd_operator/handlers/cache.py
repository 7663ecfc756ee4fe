"""What the API server has, as its watches told us: reconciling reads from here and makes no request.

Objects are kept as JSON text. As Python objects, those of a few hundred resources would take several
hundred megabytes.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from ..apply.diff import MANAGER
from ..apply.kinds import AUTOSCALER, RESOURCE, Kind
from ..apply.plan import Ref
from ..render.labels import INSTANCE_LABEL, MANAGED_BY, MANAGED_BY_LABEL

Object = dict[str, Any]


class Key(NamedTuple):
    """One `EPDDeployment`."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def nobodys(namespace: str) -> Key:
    """What is kept of a namespace though it was not made for any resource: others' autoscalers."""
    return Key(namespace, "")


class _Place(NamedTuple):
    kind: Kind
    namespace: str
    name: str


class _Entry(NamedTuple):
    uid: str
    version: int
    key: Key
    text: bytes


class Cache:
    """Resources, their children and their pods. Each change returns the resources that it is about."""

    def __init__(self) -> None:
        self._entries: dict[_Place, _Entry] = {}
        self._children: defaultdict[Key, set[_Place]] = defaultdict(set)

    def put(self, kind: Kind, found: Object) -> Key | None:
        """Takes an object in; None when it is known, or older than what is known."""
        metadata = found["metadata"]
        place = _Place(kind, metadata["namespace"], metadata["name"])
        known = self._entries.get(place)
        version = int(metadata["resourceVersion"])
        if known is not None and known.uid == metadata["uid"] and known.version >= version:
            return None
        if known is not None:
            self._forget(place)
        key = _key_of(kind, metadata)
        self._entries[place] = _Entry(metadata["uid"], version, key, _text(kind, found))
        if kind is not RESOURCE:
            self._children[key].add(place)
        return key

    def remove(self, kind: Kind, found: Object) -> Key | None:
        """Forgets an object that is gone; None when it was not known, or is there anew."""
        metadata = found["metadata"]
        place = _Place(kind, metadata["namespace"], metadata["name"])
        known = self._entries.get(place)
        if known is None or known.uid != metadata["uid"]:
            return None
        self._forget(place)
        return known.key

    def retain(self, kind: Kind, namespace: str | None, names: Set[tuple[str, str]]) -> set[Key]:
        """Forgets what is not among these (by namespace and name) of a kind, in one namespace or all."""
        gone = [
            place
            for place in self._entries
            if place.kind == kind and namespace in (None, place.namespace) and place[1:] not in names
        ]
        keys = {self._entries[place].key for place in gone}
        for place in gone:
            self._forget(place)
        return keys

    def resource(self, key: Key) -> Object | None:
        """A resource; None when there is none."""
        entry = self._entries.get(_Place(RESOURCE, *key))
        return None if entry is None else _object(entry)

    def resources(self) -> Iterator[Key]:
        """All resources there are."""
        yield from [entry.key for place, entry in self._entries.items() if place.kind is RESOURCE]

    def children(self, key: Key) -> dict[Ref, Object]:
        """What was made for a resource: its children, and their pods."""
        places = sorted(self._children.get(key, ()), key=lambda place: (place.kind.kind, place.name))
        return {Ref(place.kind.kind, place.name): _object(self._entries[place]) for place in places}

    def of_kind(self, key: Key, kind: Kind) -> list[Object]:
        """What of one kind was made for a resource, by name."""
        places = sorted(place for place in self._children.get(key, ()) if place.kind == kind)
        return [_object(self._entries[place]) for place in places]

    def _forget(self, place: _Place) -> None:
        key = self._entries.pop(place).key
        self._children[key].discard(place)
        if not self._children[key]:
            del self._children[key]


def _key_of(kind: Kind, metadata: Object) -> Key:
    if kind is RESOURCE:
        return Key(metadata["namespace"], metadata["name"])
    labels = metadata.get("labels", {})
    if kind.kind == AUTOSCALER and labels.get(MANAGED_BY_LABEL) != MANAGED_BY:
        return nobodys(metadata["namespace"])
    # A resource's name is a label's value: `api` admits no longer one.
    return Key(metadata["namespace"], labels.get(INSTANCE_LABEL, ""))


def _text(kind: Kind, found: Object) -> bytes:
    metadata = dict(found["metadata"])
    ours = [
        entry
        for entry in metadata.pop("managedFields", ())
        if entry["manager"] == MANAGER and entry["operation"] == "Apply"
    ]
    if ours and kind is not RESOURCE:
        metadata["managedFields"] = ours
    stored = {**found, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    return json.dumps(stored, separators=(",", ":")).encode()


def _object(entry: _Entry) -> Object:
    found: Object = json.loads(entry.text)
    return found
