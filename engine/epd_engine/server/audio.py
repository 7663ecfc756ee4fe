"""Sound decoded to one channel of float samples, with a limit on every step.

Files are read by libsndfile and mixed the way transformers' own loader does it: the mean of all channels.
"""

import io

import numpy as np
import soundfile

from epd_engine.config import MediaLimits
from epd_engine.ec_store.keys import MediaContent
from epd_engine.models.audio import Waveform
from epd_engine.server.media import decoding, refuse

# libsndfile reads many more, each of them a parser that strangers could reach.
FORMATS = ("wav", "flac", "ogg", "mp3")
MIN_RATE, MAX_RATE = 1_000, 384_000  # samples per second
RIFF_HEADER, CHUNK_HEADER, OGG_HEADER = 12, 8, 27  # bytes


def decode_audio(data: bytes, limits: MediaLimits, param: str) -> Waveform:
    """Raises `RequestError` for what is no sound, is damaged, or is too large."""
    kind = _format(data)
    if kind is None:
        raise refuse(f"the data is not sound in a known format ({', '.join(FORMATS)})", param)
    end = {"wav": _wav_end, "ogg": _ogg_end}.get(kind, len)(data)
    if end > len(data):
        raise refuse(f"the sound is truncated: {end} bytes are declared, but there are {len(data)}", param)
    stream = io.BytesIO(data)
    with decoding("sound", param):
        try:
            with soundfile.SoundFile(stream) as file:
                _check_header(file, limits, param)
                samples = file.read(dtype="float32", always_2d=True)
                if len(samples) < file.frames:
                    message = f"the sound is truncated: {len(samples)} of {file.frames} samples can be read"
                    raise refuse(message, param)
                sound = Waveform(_mono(samples), file.samplerate)
        except soundfile.LibsndfileError as error:
            raise refuse(f"the sound cannot be decoded: {error.error_string}", param) from error
    # Without a Xing header the length of an MP3 is guessed from its first frames, and reading ends there.
    if kind == "mp3" and _format(data[stream.tell() :][:3]) == "mp3":
        raise refuse("the MP3 has a variable bit rate and no Xing header; send it as wav or flac", param)
    if not len(sound.samples):
        raise refuse("the sound is empty: it has no samples", param)
    if not np.isfinite(sound.samples).all():
        raise refuse("the sound has samples that are NaN or infinite", param)
    return sound


def audio_content(sound: Waveform) -> MediaContent:
    return MediaContent("f32", (len(sound.samples), sound.rate), sound.samples.data)


def _check_header(file: soundfile.SoundFile, limits: MediaLimits, param: str) -> None:
    """What the file says of itself, before any memory is taken for its samples."""
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise refuse(
            f"a rate of {file.samplerate} samples per second; taken are {MIN_RATE} to {MAX_RATE}", param
        )
    if file.frames > limits.max_audio_seconds * file.samplerate:
        seconds = file.frames / file.samplerate
        raise refuse(f"a sound of {seconds:.1f} seconds exceeds {limits.max_audio_seconds:g}", param)
    if file.frames * file.channels > limits.max_audio_samples:
        message = f"{file.frames} samples of {file.channels} channels exceed {limits.max_audio_samples}"
        raise refuse(message, param)


def _mono(samples: np.ndarray) -> np.ndarray:
    """`[n, channels]` to `[n]` float32, contiguous."""
    mixed = samples[:, 0] if samples.shape[1] == 1 else samples.T.mean(axis=0)
    return np.ascontiguousarray(mixed, dtype=np.float32)


def _format(data: bytes) -> str | None:
    """The format by a file's first bytes; its name and type are only a client's word."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    # An ID3 tag, or the sync word of an MPEG layer III frame.
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2):
        return "mp3"
    return None


# libsndfile takes these two formats for whole wherever they end.


def _wav_end(data: bytes) -> int:
    """Where a WAV file's samples end by the word of its header; 0 if there are none."""
    at = RIFF_HEADER
    while at + CHUNK_HEADER <= len(data):
        size = int.from_bytes(data[at + 4 : at + CHUNK_HEADER], "little")
        if data[at : at + 4] == b"data":
            return at + CHUNK_HEADER + size
        at += CHUNK_HEADER + size + size % 2
    return 0


def _ogg_end(data: bytes) -> int:
    """Where the last page of an Ogg file ends: a header, a table of sizes, and as many bytes."""
    at = data.rfind(b"OggS")
    table = at + OGG_HEADER
    if table > len(data):
        return table
    count = data[table - 1]
    return table + count + sum(data[table : table + count])
