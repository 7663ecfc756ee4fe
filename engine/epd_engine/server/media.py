"""Media from where the client says, and pictures decoded to RGB, with a limit on every step.

Pictures are read the way transformers' own loader reads them: first frame, EXIF orientation applied,
converted to RGB.
"""

import asyncio
import binascii
import io
import ipaddress
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio.to_thread
import httpx
from PIL import Image, ImageOps, UnidentifiedImageError

from epd_engine.config import MediaLimits
from epd_engine.core.request import RequestError
from epd_engine.ec_store.keys import MediaContent

log = logging.getLogger(__name__)

# Pillow reads many more, each of them a parser that strangers could reach.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
BASE64_CHUNK = 1 << 18  # characters, a multiple of 4; no other thread runs while one is decoded
Image.MAX_IMAGE_PIXELS = None  # our own limit is checked before any pixel is decoded


def refuse(message: str, param: str, code: str = "invalid_media") -> RequestError:
    return RequestError(400, code, f"{param}: {message}", param)


@contextmanager
def decoding(kind: str, param: str) -> Iterator[None]:
    """Whatever fails in here is the fault of the client's bytes: damaged ones make decoders raise anything.
    Raises `RequestError`."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        log.info("a %s cannot be decoded: %r", kind, error)
        raise refuse(f"the {kind} cannot be decoded: {error}", param) from error


async def read_source(url: str, limits: MediaLimits, param: str, pool: Executor | None = None) -> bytes:
    """The encoded bytes behind a data or http(s) URL; base64 is decoded in `pool`. Raises `RequestError`
    naming `param`."""
    scheme = url[:6].partition(":")[0].lower()
    if scheme == "data":
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, _read_data_url, url, limits, param)
    if scheme in ("http", "https"):
        return await _fetch(url, limits, param)
    raise refuse("only data:, http: and https: URLs are read", param, "invalid_url")


def decode_base64(text: str, limits: MediaLimits, param: str) -> bytes:
    if len(text) > limits.max_bytes * 4 // 3 + 4:
        raise _too_large(limits, param)
    try:
        if text.find("=", 0, -2) >= 0:
            raise ValueError("padding comes before its end")
        chunks = (text[at : at + BASE64_CHUNK] for at in range(0, len(text), BASE64_CHUNK))
        return b"".join(binascii.a2b_base64(chunk, strict_mode=True) for chunk in chunks)
    except ValueError as error:
        raise refuse(f"the base64 data is broken: {error}", param) from error


def decode_image(data: bytes, limits: MediaLimits, param: str) -> Image.Image:
    """An RGB image. Raises `RequestError` for what is no picture, is damaged, or is too large."""
    with decoding("picture", param):
        try:
            image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        except UnidentifiedImageError as error:
            known = ", ".join(IMAGE_FORMATS)
            raise refuse(f"the data is not a picture in a known format ({known})", param) from error
        with image:
            if image.width * image.height > limits.max_pixels:
                raise refuse(
                    f"a picture of {image.width}x{image.height} exceeds {limits.max_pixels} pixels", param
                )
            return ImageOps.exif_transpose(image).convert("RGB")


def image_content(image: Image.Image) -> MediaContent:
    return MediaContent("RGB", image.size, image.tobytes())


def _read_data_url(url: str, limits: MediaLimits, param: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise refuse("a data URL must have the form data:TYPE;base64,DATA", param, "invalid_url")
    return decode_base64(payload, limits, param)


async def _fetch(url: str, limits: MediaLimits, param: str) -> bytes:
    """One GET without redirects, to an address that was checked before it is connected to."""
    try:
        async with asyncio.timeout(limits.fetch_timeout):  # of all of it: httpx knows only that of a read
            return await _get(url, limits, param)
    except (httpx.HTTPError, TimeoutError) as error:
        message = f"the media could not be fetched: {type(error).__name__}"
        raise refuse(message, param, "media_fetch_failed") from error


async def _get(url: str, limits: MediaLimits, param: str) -> bytes:
    address, headers, extensions = await _resolve(url, limits, param)
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
            socket.getaddrinfo,
            host,
            port or (443 if parts.scheme == "https" else 80),
            0,
            socket.SOCK_STREAM,
            abandon_on_cancel=True,  # a name server that is silent must not outlast the timeout
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
