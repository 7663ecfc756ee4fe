"""The maker of random checkpoints: whole folders, that transformers and every role of ours load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.make_model import FAMILIES, make
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from epd_engine.models.checkpoint import Checkpoint
from epd_engine.models.registry import family_of
from tests.support.digits import ROOT


@pytest.mark.parametrize("family", FAMILIES)
def test_our_halves_are_the_whole_model(tmp_path: Path, family: str) -> None:
    count = make(tmp_path, family, "tiny")
    loaded = family_of(Checkpoint(tmp_path))(Checkpoint(tmp_path), torch.float32, torch.device("cpu"))
    loaded.load_tower()
    loaded.load_language()
    assert sum(p.numel() for m in loaded.modules() for p in m.parameters()) == count
    for modality in loaded.modalities:
        (output,) = loaded.encode([loaded.process(modality, loaded.blank(modality), {}).features])
        assert torch.isfinite(output).all()


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    make(tmp_path / "picture", "qwen2_5_vl", "tiny", dtype=torch.bfloat16)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "picture").dtype is torch.bfloat16
    assert AutoImageProcessor.from_pretrained(tmp_path / "picture", backend="pil").merge_size == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "picture")
    part = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "é?"}]}]
    text = tokenizer.apply_chat_template(part, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>é?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    make(tmp_path / "sound", "qwen2_audio", "tiny")
    assert AutoProcessor.from_pretrained(tmp_path / "sound").audio_token == "<|AUDIO|>"


def test_one_seed_is_one_model(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(tmp_path / name, "qwen2_audio", "tiny", seed)
    first, again, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert first == again
    assert first != other


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    argv = [sys.executable, "benchmarks/make_model.py", str(tmp_path / "out"), "--family", "qwen2_audio"]
    said = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "qwen2_audio, 1.0 million parameters" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2AudioForConditionalGeneration"]
