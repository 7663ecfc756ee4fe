"""The few requests that the operator makes by itself. All reading in bulk is kopf's."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from .diff import MANAGER

Object = dict[str, Any]

_TIMEOUT_S = 30.0
_CONCURRENT_REQUESTS = 16
_APPLY = "application/apply-patch+yaml"
_NOT_FOUND, _CONFLICT = 404, 409


class ApiError(Exception):
    """The API server refused a request, or gave no answer (`status` is 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_conflict(self) -> bool:
        """Whether the object exists already, or has changed in between."""
        return self.status == _CONFLICT


class Api:
    """An asynchronous client over a session that carries the credentials. Every method raises ApiError."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session = session
        self._server = server
        self._slots = asyncio.Semaphore(_CONCURRENT_REQUESTS)

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    async def get(self, path: str) -> Object | None:
        """An object; None where there is none."""
        try:
            return await self._request("GET", path)
        except ApiError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def apply(
        self, path: str, manifest: Mapping[str, Any], *, manager: str = MANAGER, force: bool = True
    ) -> Object:
        """Server-side apply; the object as it is afterwards. Without `force`, others' fields conflict."""
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self._request("PATCH", path, manifest, query=query, content_type=_APPLY)

    async def create(self, path: str, manifest: Mapping[str, Any]) -> Object:
        """Makes an object in a collection."""
        return await self._request("POST", path, manifest, query={"fieldManager": MANAGER})

    async def replace(self, path: str, manifest: Mapping[str, Any]) -> Object:
        """Writes a whole object, of the version that it names."""
        return await self._request("PUT", path, manifest, query={"fieldManager": MANAGER})

    async def merge(self, path: str, change: Mapping[str, Any]) -> Object:
        """Changes some fields of an object."""
        content_type = "application/merge-patch+json"
        return await self._request(
            "PATCH", path, change, query={"fieldManager": MANAGER}, content_type=content_type
        )

    async def delete(self, path: str, uid: str) -> None:
        """Deletes that object, and what it owns in the background. One that is gone is fine."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            await self._request("DELETE", path, options)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        data = None if body is None else json.dumps(body)
        try:
            async with (
                self._slots,
                self._session.request(
                    method,
                    self._server + path,
                    data=data,
                    params=query,
                    headers={"Content-Type": content_type},
                    timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
                ) as response,
            ):
                text = await response.text()
                if not response.ok:
                    raise ApiError(response.status, _words(text) or response.reason or "refused")
                answer: Object = json.loads(text)
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"no answer from the API server: {error!r}") from error


def _words(text: str) -> str:
    """The message of a Status, or the text itself."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text.strip()
    return str(answer.get("message", text)) if isinstance(answer, dict) else text
