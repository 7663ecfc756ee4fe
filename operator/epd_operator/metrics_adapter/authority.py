"""The authority in its Secret, and the API server's trust in it."""

import base64
import logging
from collections.abc import Sequence
from typing import Any

from ..apply.api import Api, ApiError
from ..apply.kinds import Kind
from .certificates import Pair, is_due, make_authority, still_valid, utc_now
from .objects import VERSIONS

log = logging.getLogger(__name__)

SECRET = Kind("v1", "Secret", "secrets")
API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
CERTIFICATE, KEY = "ca.crt", "ca.key"


class SharedAuthority:
    """All replicas look at one Secret. Whoever finds it missing or due makes it anew; who is second uses what
    the first has made. Authorities of before stay trusted until they run out, since replicas learn of a new
    one at different times."""

    def __init__(self, api: Api, namespace: str, name: str, groups: Sequence[str]) -> None:
        """`groups` are the API groups that the adapter serves."""
        self._api = api
        self._collection = SECRET.collection(namespace)
        self._path = SECRET.path(namespace, name)
        self._metadata = {"name": name, "namespace": namespace}
        self._services = [f"{version}.{group}" for group in groups for version in VERSIONS[group]]
        self._trusted = b""

    async def look(self) -> Pair:
        """The authority to sign with. The API server trusts it when this returns. Raises ApiError."""
        found = await self._api.get(self._path)
        bundle, authority = _read(found)
        if authority is None or is_due(authority.certificate, utc_now()):
            bundle, authority = await self._renew(found, bundle or self._trusted)
        for service in self._services:
            await self._be_trusted(service, bundle)
        self._trusted = bundle
        return authority

    async def _renew(self, found: dict[str, Any] | None, bundle: bytes) -> tuple[bytes, Pair]:
        now = utc_now()
        made = make_authority(now)
        bundle = b"".join([made.certificate, *still_valid(bundle, now)[:2]])
        data = {CERTIFICATE: _encoded(bundle), KEY: _encoded(made.key)}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": self._metadata, "data": data}
        try:
            if found is None:
                await self._api.create(self._collection, secret)
            else:
                # Refused if another replica was faster.
                secret["metadata"] = found["metadata"]
                await self._api.replace(self._path, secret)
        except ApiError as error:
            if not error.is_conflict:
                raise
            bundle, authority = _read(await self._api.get(self._path))
            if authority is None:
                raise
            return bundle, authority
        log.info("a new authority", extra={"secret": self._metadata["name"]})
        return bundle, made

    async def _be_trusted(self, service: str, bundle: bytes) -> None:
        path = f"{API_SERVICES}/{service}"
        found = await self._api.get(path)
        if found is None:
            raise ApiError(404, f"APIService {service} does not exist")
        if found["spec"].get("caBundle") != _encoded(bundle):
            await self._api.merge(path, {"spec": {"caBundle": _encoded(bundle)}})
            log.info("the API server trusts the authority", extra={"api_service": service})


def _read(secret: dict[str, Any] | None) -> tuple[bytes, Pair | None]:
    """The bundle, and the authority whose certificate is the first in it; none of a Secret that lacks it."""
    try:
        data = (secret or {}).get("data") or {}
        bundle, key = base64.b64decode(data[CERTIFICATE]), base64.b64decode(data[KEY])
    except (KeyError, ValueError):
        return b"", None
    certificates = still_valid(bundle, utc_now())
    return bundle, Pair(certificates[0], key) if certificates and key else None


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
