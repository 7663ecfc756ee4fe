"""Renderings that are kept for the next look, which most often finds the same spec."""

import json
from typing import Any

from ..api import EPDDeployment
from ..render import RenderContext, render
from .cache import Key

Object = dict[str, Any]


class Renderings:
    """The manifests of each resource, as text: as Python objects they would take several times the memory."""

    def __init__(self, context: RenderContext) -> None:
        self._context = context
        self._texts: dict[Key, tuple[str | None, int | None, bytes]] = {}

    def manifests(self, key: Key, deployment: EPDDeployment) -> list[Object]:
        """The manifests of a resource. Raises RenderError."""
        metadata = deployment.metadata
        known = self._texts.get(key)
        # The API server raises the generation with each change of the spec.
        if known is None or known[:2] != (metadata.uid, metadata.generation):
            text = json.dumps(render(deployment, self._context), separators=(",", ":")).encode()
            known = self._texts[key] = (metadata.uid, metadata.generation, text)
        manifests: list[Object] = json.loads(known[2])
        return manifests

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._texts.pop(key, None)
