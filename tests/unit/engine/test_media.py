import asyncio
import base64
import io
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterable

import pytest
from PIL import Image
from transformers.image_utils import load_image

from epd_engine.config import MediaLimits
from epd_engine.core.request import RequestError
from epd_engine.server.media import BASE64_CHUNK, decode_base64, decode_image, image_content, read_source

LIMITS = MediaLimits()


def encoded(image: Image.Image, fmt: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def gradient(mode: str = "RGB") -> Image.Image:
    base = Image.linear_gradient("L").resize((40, 30))
    return Image.merge("RGB", (base, base.rotate(180), base)).convert(mode)


def animated_gif() -> bytes:
    frames = [gradient(), gradient().rotate(90)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def palette_with_alpha() -> bytes:
    image = gradient().quantize(16)
    image.info["transparency"] = bytes(range(0, 256, 16))
    return encoded(image, "PNG", transparency=bytes(range(0, 256, 16)))


def exif_rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(gradient(), "JPEG", exif=exif)


def sixteen_bit() -> bytes:
    return encoded(Image.frombytes("I;16", (40, 30), bytes(range(240)) * 10))


def bomb(side: int = 30_000) -> bytes:
    """A PNG of side x side pixels in a few bytes of header; its pixel data need not exist."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: encoded(gradient()),
        lambda: encoded(gradient(), "JPEG"),
        lambda: encoded(gradient("CMYK"), "JPEG"),
        lambda: encoded(gradient("L")),
        lambda: encoded(gradient("RGBA")),
        lambda: encoded(gradient("1")),
        lambda: encoded(gradient(), "WEBP"),
        lambda: encoded(gradient(), "AVIF"),
        lambda: encoded(gradient(), "TIFF"),
        lambda: encoded(gradient(), "BMP"),
        lambda: encoded(gradient(), "MPO", save_all=True, append_images=[gradient()]),  # of many phones
        sixteen_bit,
        palette_with_alpha,
        animated_gif,
        exif_rotated,
    ],
)
def test_pictures_are_read_as_transformers_loader_reads_them(make: Callable[[], bytes]) -> None:
    data = make()
    ours = decode_image(data, LIMITS, "p")
    theirs = load_image(base64.b64encode(data).decode())
    assert ours.mode == "RGB"
    assert ours.size == theirs.size
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not a picture"),
        (b"hello", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (encoded(gradient(), "JPEG")[:300], "cannot be decoded"),
        (encoded(gradient())[:80], "cannot be decoded"),
        (bomb(), "30000x30000 exceeds"),
    ],
)
def test_what_is_no_whole_picture_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        decode_image(data, LIMITS, "messages[0].content[0].image_url.url")
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize("fmt", ["PPM", "ICO", "TGA", "PCX", "SPIDER"])
def test_formats_that_clients_do_not_use_are_refused(fmt: str) -> None:
    image = gradient("F") if fmt == "SPIDER" else gradient()
    with pytest.raises(RequestError, match="not a picture in a known format") as caught:
        decode_image(encoded(image, fmt), LIMITS, "p")
    assert caught.value.code == "invalid_media"


def damaged(data: bytes, seed: int) -> bytes:
    draw, out = random.Random(seed), bytearray(data)
    for _ in range(draw.randint(1, 3)):
        out[draw.randrange(min(len(out), 300))] = draw.randrange(256)
    return bytes(out)


def with_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x8769] = 6, "maker", {0x9003: "2020:01:01 00:00:00"}
    return exif


# Seeds at which this Pillow raises what it does not declare: RuntimeError, struct.error, AttributeError.
@pytest.mark.parametrize(("fmt", "seeds"), [("AVIF", range(40)), ("JPEG", [898]), ("WEBP", [130, 1042])])
def test_damaged_bytes_are_their_senders_fault_whatever_a_decoder_raises(
    fmt: str, seeds: Iterable[int]
) -> None:
    data = encoded(gradient(), fmt, **({} if fmt == "AVIF" else {"exif": with_exif()}))
    refusals = []
    for seed in seeds:
        try:
            decode_image(damaged(data, seed), LIMITS, "p")
        except RequestError as error:
            refusals.append(error)
    assert {(e.status, e.code, e.param) for e in refusals} == {(400, "invalid_media", "p")}


def test_a_pictures_shape_is_part_of_its_content() -> None:
    wide, tall = Image.new("RGB", (30, 150)), Image.new("RGB", (150, 30))
    assert image_content(wide).size != image_content(tall).size


async def test_a_data_url_is_read() -> None:
    assert await read_source("data:image/png;base64,aGk=", LIMITS, "p") == b"hi"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", "invalid_url"),
        ("/etc/passwd", "invalid_url"),
        ("ftp://example.com/x", "invalid_url"),
        ("", "invalid_url"),
        ("data:image/png,raw", "invalid_url"),
        ("data:image/png;base64", "invalid_url"),
        ("data:image/png;base64,####", "invalid_media"),
        ("data:image/png;base64,aGk", "invalid_media"),
        ("data:image/png;base64,aGk=aGk=", "invalid_media"),
        ("data:image/png;base64," + "A" * (BASE64_CHUNK - 4) + "aGk=aGk=", "invalid_media"),
        ("data:image/png;base64,aGk\u00e9", "invalid_media"),
        ("httpsx://example.com/x.png", "invalid_url"),
        ("http://", "invalid_url"),
        ("http://[::1", "invalid_url"),
        ("http://user:secret@example.com/x.png", "invalid_url"),
        ("http://example.com/x.png", "media_domain_not_allowed"),
        ("https://169.254.169.254/latest/meta-data", "media_domain_not_allowed"),
    ],
)
async def test_urls_are_refused_with_a_reason(url: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        await read_source(url, LIMITS, "p")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "p")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.1", "[::1]", "169.254.169.254", "localhost", "0.0.0.0"]
)
async def test_a_wildcard_never_reaches_a_private_address(host: str) -> None:
    limits = MediaLimits(allowed_domains=("*",))
    with pytest.raises(RequestError, match="private address") as caught:
        await read_source(f"http://{host}:9/x.png", limits, "p")
    assert caught.value.code == "media_domain_not_allowed"


async def test_a_suffix_matches_whole_labels_only() -> None:
    limits = MediaLimits(allowed_domains=(".example.com",))
    with pytest.raises(RequestError, match="not allowed"):
        await read_source("http://badexample.com/x.png", limits, "p")


def test_data_beyond_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match="exceeds 8 bytes") as caught:
        decode_base64("A" * 100, MediaLimits(max_bytes=8), "p")
    assert caught.value.status == 413


async def test_the_event_loop_goes_on_while_base64_is_decoded() -> None:
    data = os.urandom(8 << 20)
    reading = asyncio.create_task(read_source(f"data:;base64,{base64.b64encode(data).decode()}", LIMITS, "p"))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert reading.result() == data
    assert turns > 10


async def test_a_server_that_sends_byte_by_byte_does_not_outlast_the_timeout() -> None:
    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.02)

    limits = MediaLimits(allowed_domains=("127.0.0.1",), fetch_timeout=0.5)
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RequestError, match="could not be fetched: TimeoutError") as caught:
            await read_source(f"http://127.0.0.1:{port}/x.png", limits, "p")
    assert (caught.value.status, caught.value.code) == (400, "media_fetch_failed")
