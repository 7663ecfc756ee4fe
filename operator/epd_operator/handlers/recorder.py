"""Events about a resource."""

import logging
from typing import Any

from ..apply.api import Api, ApiError
from ..apply.kinds import RESOURCE, Kind
from ..status.events import Note

Object = dict[str, Any]
log = logging.getLogger(__name__)

EVENT = Kind("v1", "Event", "events")
_COMPONENT = "epd-operator"


class Recorder:
    """Tells news as Events; the same news again raises the count of the one that is there."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def tell(self, resource: Object, note: Note, now: str) -> None:
        """One piece of news. Events are a courtesy: one that cannot be written is logged, and no more."""
        metadata = resource["metadata"]
        name = note.name(metadata)
        path = EVENT.path(metadata["namespace"], name)
        try:
            try:
                await self._api.create(
                    EVENT.collection(metadata["namespace"]), _event(name, resource, note, now)
                )
            except ApiError as error:
                if not error.is_conflict:
                    raise
                known = await self._api.get(path) or {}
                await self._api.merge(path, {"count": known.get("count", 1) + 1, "lastTimestamp": now})
        except ApiError as error:
            log.warning("event not written", extra={"resource": metadata["name"], "error": str(error)})


def _event(name: str, resource: Object, note: Note, now: str) -> Object:
    metadata = resource["metadata"]
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message,
        "source": {"component": _COMPONENT},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
