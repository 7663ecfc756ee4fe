"""Media from where the client says, and pictures decoded to RGB, with a limit on every step.

Pictures are read the way transformers' own loader reads them: first frame, EXIF orientation applied,
converted to RGB.
"""

import base64
import binascii
import io
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
import httpx
from PIL import Image, ImageOps, UnidentifiedImageError

from epd_engine.config import MediaLimits
from epd_engine.core.request import RequestError
from epd_engine.ec_store.keys import MediaContent

Image.MAX_IMAGE_PIXELS = None  # our own limit is checked before any pixel is decoded


def refuse(message: str, param: str, code: str = "invalid_media") -> RequestError:
    return RequestError(400, code, f"{param}: {message}", param)


async def read_source(url: str, limits: MediaLimits, param: str) -> bytes:
    """The encoded bytes behind a data or http(s) URL. Raises `RequestError` naming `param`."""
    scheme = url.split(":", 1)[0].lower()
    if scheme == "data":
        return _read_data_url(url, limits, param)
    if scheme in ("http", "https"):
        return await _fetch(url, limits, param)
    raise refuse("only data:, http: and https: URLs are read", param, "invalid_url")


def decode_base64(text: str, limits: MediaLimits, param: str) -> bytes:
    if len(text) > limits.max_bytes * 4 // 3 + 4:
        raise _too_large(limits, param)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refuse(f"the base64 data is broken: {error}", param) from error


def decode_image(data: bytes, limits: MediaLimits, param: str) -> Image.Image:
    """An RGB image. Raises `RequestError` for what is no picture, is damaged, or is too large."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > limits.max_pixels:
                raise refuse(
                    f"a picture of {image.width}x{image.height} exceeds {limits.max_pixels} pixels", param
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise refuse("the data is not a picture in a known format", param) from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise refuse(f"the picture cannot be decoded: {error}", param) from error


def image_content(image: Image.Image) -> MediaContent:
    return MediaContent("RGB", image.size, image.tobytes())


def _read_data_url(url: str, limits: MediaLimits, param: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise refuse("a data URL must have the form data:TYPE;base64,DATA", param, "invalid_url")
    return decode_base64(payload, limits, param)


async def _fetch(url: str, limits: MediaLimits, param: str) -> bytes:
    """One GET without redirects, to an address that was checked before it is connected to."""
    address, headers, extensions = await _resolve(url, limits, param)
    try:
        async with (
            httpx.AsyncClient(timeout=limits.fetch_timeout, trust_env=False) as client,
            client.stream("GET", address, headers=headers, extensions=extensions) as response,
        ):
            if response.status_code != 200:
                raise refuse(f"the server answered {response.status_code}", param, "media_fetch_failed")
            data = bytearray()
            async for part in response.aiter_bytes():
                data += part
                if len(data) > limits.max_bytes:
                    raise _too_large(limits, param)
            return bytes(data)
    except httpx.HTTPError as error:
        message = f"the media could not be fetched: {type(error).__name__}"
        raise refuse(message, param, "media_fetch_failed") from error


async def _resolve(
    url: str, limits: MediaLimits, param: str
) -> tuple[httpx.URL, dict[str, str], dict[str, Any]]:
    """The URL with its host replaced by a checked address, so that a name cannot change its mind between
    check and connection. A host that is allowed by its exact name may be private; "*" and ".suffix" reach
    public addresses alone."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        target = httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise refuse("the URL is malformed", param, "invalid_url") from error
    if not host or parts.username is not None or parts.password is not None:
        raise refuse("the URL must name a host, and no user", param, "invalid_url")
    exact = host in limits.allowed_domains
    if not exact and not any(_matches(host, domain) for domain in limits.allowed_domains):
        raise refuse(
            f"fetching from {host} is not allowed (--allowed-media-domains); send a data URL",
            param,
            "media_domain_not_allowed",
        )
    try:
        found = await anyio.to_thread.run_sync(
            socket.getaddrinfo, host, port or (443 if parts.scheme == "https" else 80), 0, socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise refuse(f"the host {host} cannot be found", param, "media_fetch_failed") from error
    address = str(found[0][4][0])
    if not exact and not ipaddress.ip_address(address).is_global:
        raise refuse(f"{host} is at a private address", param, "media_domain_not_allowed")
    return target.copy_with(host=address), {"Host": target.netloc.decode()}, {"sni_hostname": host}


def _matches(host: str, domain: str) -> bool:
    return domain == "*" or (domain.startswith(".") and host.endswith(domain))


def _too_large(limits: MediaLimits, param: str) -> RequestError:
    message = f"{param}: the media exceeds {limits.max_bytes} bytes"
    return RequestError(413, "media_too_large", message, param)
