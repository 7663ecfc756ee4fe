"""KV belongs to all weights, an encoder output to the tower's alone."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from epd_engine.models.checkpoint import Checkpoint
from epd_engine.models.fingerprint import language_fingerprint, model_fingerprint
from epd_engine.models.registry import family_of
from tests.support.digits import MODEL


def test_other_language_weights_are_another_models_kv(tmp_path: Path) -> None:
    copy = shutil.copytree(MODEL, tmp_path / "model")
    ours, same = Checkpoint.find(str(MODEL), None), Checkpoint.find(str(copy), None)
    assert language_fingerprint(ours) == language_fingerprint(same)
    (path,) = copy.glob("*.safetensors")
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name] + torch.ones((), dtype=tensors[name].dtype)
    save_file(tensors, path, {"format": "pt"})
    other = Checkpoint.find(str(copy), None)
    prefixes = tuple(family_of(other).tower_names)
    assert model_fingerprint(other, prefixes) == model_fingerprint(ours, prefixes)
    assert language_fingerprint(other) != language_fingerprint(ours)
