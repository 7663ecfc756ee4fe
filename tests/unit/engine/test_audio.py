"""Sounds decoded: equal to transformers' own loader, and refused in clear words."""

import base64
import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
import soundfile
from transformers.audio_utils import load_audio

from epd_engine.config import MediaLimits
from epd_engine.core.request import RequestError
from epd_engine.models.audio import resample
from epd_engine.server.audio import audio_content, decode_audio
from tests.support.sounds import RATE, sound, tone, wav

LIMITS = MediaLimits()


def encoded(samples: np.ndarray, kind: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def patched(data: bytes, at: int, fmt: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(fmt, out, at, value)
    return bytes(out)


def endless_flac() -> bytes:
    """A FLAC file whose header declares 2^36 - 1 samples: 12 days of them."""
    data = bytearray(encoded(tone(1), "FLAC"))
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    return bytes(data)


def bomb() -> bytes:
    """Ten minutes of eight silent channels at a high rate, in a few kilobytes."""
    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 192_000, 8, format="FLAC", subtype="PCM_16") as file:
        for _ in range(50):
            file.write(np.zeros((192_000, 8), np.int16))
    return buffer.getvalue()


def vbr_without_its_header() -> bytes:
    """libsndfile guesses the length of such a file, and would end in the middle without a word."""
    buffer = io.BytesIO()
    samples = np.concatenate([tone(4) * 0.01, tone(4, 1)])
    soundfile.write(buffer, samples, RATE, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    data = buffer.getvalue()
    return data[data.find(data[:2], 4) :]


GOOD = {
    "wav, 16 bit": lambda: sound(1),
    "wav, stereo at 44.1 kHz": lambda: wav(tone(1.3, 2, 44_100, 2), 44_100),
    "wav, six channels": lambda: wav(tone(1, 2, 48_000, 6), 48_000),
    "wav, 8 kHz": lambda: wav(tone(1, 2, 8_000), 8_000),
    "wav, 8 bit": lambda: encoded(tone(1), "WAV", "PCM_U8"),
    "wav, 24 bit": lambda: encoded(tone(1), "WAV", "PCM_24"),
    "wav, float": lambda: encoded(tone(1), "WAV", "FLOAT"),
    "wav, A-law": lambda: encoded(tone(1), "WAV", "ALAW"),
    "wav, extensible": lambda: encoded(tone(1), "WAVEX", "PCM_16"),
    "wav, one sample": lambda: wav(tone(1)[:1]),
    "flac": lambda: encoded(tone(1, 3, 22_050), "FLAC", None, 22_050),
    "ogg, vorbis": lambda: encoded(tone(1), "OGG", "VORBIS"),
    "ogg, opus": lambda: encoded(tone(1), "OGG", "OPUS"),
    "mp3": lambda: encoded(tone(1), "MP3"),
    "mp3 with a tag behind it": lambda: encoded(tone(1), "MP3") + b"TAG" + bytes(125),
}


@pytest.mark.parametrize("name", GOOD)
def test_sounds_are_read_as_transformers_loader_reads_them(name: str) -> None:
    data = GOOD[name]()
    ours = decode_audio(data, LIMITS, "p")
    theirs = load_audio(base64.b64encode(data).decode(), RATE, backend="soundfile")
    assert ours.samples.dtype == np.float32
    assert np.array_equal(resample(ours, RATE), theirs)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not sound in a known format"),
    "text": (lambda: b"hello, I am a song", "not sound in a known format"),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(100), "not sound in a known format"),
    "a format that is not on the list": (lambda: encoded(tone(1), "AIFF"), "not sound in a known format"),
    "a header alone": (lambda: sound(1)[:44], "truncated: 32044 bytes are declared"),
    "half a header": (lambda: sound(1)[:30], "cannot be decoded"),
    "a truncated wav": (lambda: sound(1)[:-100], "truncated: 32044 bytes are declared, but there are 31944"),
    "a wav of unknown length": (
        lambda: patched(sound(1), 40, "<I", 0xFFFFFFFF),
        "4294967339 bytes are declared",
    ),
    "a truncated flac": (lambda: encoded(tone(1), "FLAC")[:-500], "decoded|truncated"),
    "a truncated mp3": (lambda: encoded(tone(2), "MP3")[:2000], "truncated: .* of 32000 samples"),
    "a truncated ogg": (lambda: encoded(tone(2), "OGG", "VORBIS")[:-400], "truncated"),
    "a truncated opus": (lambda: encoded(tone(2), "OGG", "OPUS")[:4000], "truncated"),
    "half an ogg header": (lambda: encoded(tone(2), "OGG", "VORBIS")[:20], "truncated"),
    "no samples": (lambda: wav(tone(0)), "empty"),
    "a rate of 0": (lambda: patched(sound(1), 24, "<I", 0), "cannot be decoded"),
    "a rate of 1": (lambda: patched(sound(1), 24, "<I", 1), "a rate of 1 samples per second"),
    "a rate of 2 GHz": (lambda: patched(sound(1), 24, "<I", 2**31 - 1), "a rate of 2147483647"),
    "no channels": (lambda: patched(sound(1), 22, "<H", 0), "cannot be decoded"),
    "65535 channels": (lambda: patched(sound(1), 22, "<H", 65535), "cannot be decoded"),
    "an unknown codec": (lambda: patched(sound(1), 20, "<H", 0x7777), "cannot be decoded"),
    "NaN": (lambda: encoded(np.array([[0.1], [np.nan]]), "WAV", "FLOAT"), "NaN or infinite"),
    "infinity": (lambda: encoded(np.array([[0.1], [np.inf]]), "WAV", "FLOAT"), "NaN or infinite"),
    "beyond float": (lambda: encoded(np.array([[1e300]]), "WAV", "DOUBLE"), "NaN or infinite"),
    "12 days by its header": (endless_flac, "seconds exceeds 600"),
    "a bomb": (bomb, "9600000 samples of 8 channels exceed 64000000"),
    "a guessed length": (vbr_without_its_header, "no Xing header"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_whole_sound_is_refused(name: str) -> None:
    make, match = BAD[name]
    with pytest.raises(RequestError, match=match) as caught:
        decode_audio(make(), LIMITS, "messages[0].content[0].input_audio.data")
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[0].input_audio.data"
    assert "BytesIO" not in str(caught.value)


def test_the_seconds_of_a_sound_are_limited() -> None:
    limits = MediaLimits(max_audio_seconds=2)
    assert decode_audio(sound(2), limits, "p").seconds == 2
    with pytest.raises(RequestError, match=r"2\.1 seconds exceeds 2"):
        decode_audio(sound(2.1), limits, "p")


def test_what_a_sound_is_known_by_has_its_samples_and_its_rate() -> None:
    slow, fast = (decode_audio(wav(tone(1), rate), LIMITS, "p") for rate in (16_000, 16_001))
    first, second = audio_content(slow), audio_content(fast)
    assert (first.mode, first.size) == ("f32", (16_000, 16_000))
    assert len(first.data) * 4 == memoryview(first.data).nbytes
    assert first.size != second.size
    assert bytes(first.data) == bytes(second.data)


def test_one_sound_in_two_lossless_files_is_one_sound() -> None:
    samples = (tone(1) * 32767).astype(np.int16)
    files = (encoded(samples, "FLAC"), encoded(samples, "WAV"))
    first, second = (audio_content(decode_audio(data, LIMITS, "p")) for data in files)
    assert bytes(first.data) == bytes(second.data)
