"""The model fingerprint: whose encoder outputs these are.

SHA-256 over the configs and the weights' identity: the hub commit where there is one, else the names and
shapes of all tensors and a hash of the tower's bytes. Encoder and language-only instances of one model agree
on it; the path they were started with is no part of it.
"""

import hashlib
import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

from epd_engine.ec_store.keys import canonical_json
from epd_engine.models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# What decides an encoder's output; and what in it is only a note of who wrote the file.
CONFIG_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "adapter_config.json")
VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
READ_BYTES = 1 << 20
# How the dimensions of a head lie in its keys (`layers/rotary.py`): in another order they are another's KV.
KEY_ORDER = "pairs side by side"

# Checkpoint names of tower and projector by architecture, for those who have no family module at hand. Of an
# architecture that is not here all weights are hashed.
TOWER_PREFIXES = {
    "LlavaForConditionalGeneration": (
        "model.vision_tower.",
        "vision_tower.",
        "model.multi_modal_projector.",
        "multi_modal_projector.",
    ),
    "Qwen2AudioForConditionalGeneration": (
        "model.audio_tower.",
        "audio_tower.",
        "model.multi_modal_projector.",
        "multi_modal_projector.",
    ),
    "Qwen2_5_VLForConditionalGeneration": ("model.visual.", "visual."),
    "Qwen3VLForConditionalGeneration": ("model.visual.", "visual."),
}


def model_fingerprint(checkpoint: Checkpoint, tower_prefixes: tuple[str, ...]) -> str:
    """64 hex digits. Raises `OSError` when the weights cannot be read."""
    configs = {name: _stable(checkpoint.read_json(name)) for name in CONFIG_FILES}
    weights = checkpoint.hub_commit or _weights_identity(checkpoint, tower_prefixes)
    text = canonical_json({"configs": configs, "weights": weights})
    return hashlib.sha256(text.encode()).hexdigest()


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """The model fingerprint by what the checkpoint alone says. Raises `OSError` as above."""
    return model_fingerprint(checkpoint, TOWER_PREFIXES.get(checkpoint.architecture, ("",)))


def language_fingerprint(checkpoint: Checkpoint) -> str:
    """64 hex digits that stand for all weights and for how keys lie: whose KV it is. Raises `OSError` as
    above."""
    text = canonical_json([model_fingerprint(checkpoint, ("",)), KEY_ORDER])
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in VOLATILE_KEYS}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _weights_identity(checkpoint: Checkpoint, tower_prefixes: tuple[str, ...]) -> str:
    """Computed once per state of the files, then taken from the cache directory."""
    files = sorted(set(checkpoint.tensor_files.values()))
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    state = hashlib.sha256(canonical_json([stats, tower_prefixes]).encode()).hexdigest()
    cache = _cache_directory() / state
    try:
        return cache.read_text()
    except OSError:
        pass  # not computed yet, or no such directory
    identity = _hash_weights(files, tower_prefixes)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}")
        temporary.write_text(identity)
        temporary.replace(cache)
    except OSError as error:
        log.info("the model fingerprint is not cached: %s", error)
    return identity


def _hash_weights(files: list[Path], tower_prefixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    tensors = []
    for path in files:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, said in header.items():
                tensors.append((name, said["dtype"], said["shape"], path, 8 + length, said["data_offsets"]))
    for name, dtype, shape, path, base, (begin, end) in sorted(tensors, key=lambda t: t[0]):
        digest.update(canonical_json([name, dtype, shape]).encode())
        if name.startswith(tower_prefixes):
            _hash_range(digest, path, base + begin, base + end)
    return digest.hexdigest()


def _hash_range(digest: Any, path: Path, begin: int, end: int) -> None:
    with open(path, "rb") as file:
        file.seek(begin)
        while begin < end:
            data = file.read(min(READ_BYTES, end - begin))
            digest.update(data)
            begin += len(data)


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "epd" / "fingerprints"
