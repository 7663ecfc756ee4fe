"""The audio family against transformers' own model: loading, encoder outputs, sizes, what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from epd_engine.models.audio import Waveform
from epd_engine.models.base import MediaRefused
from epd_engine.models.checkpoint import Checkpoint, CheckpointError
from epd_engine.models.fingerprint import model_fingerprint
from epd_engine.models.qwen2_audio import Qwen2Audio
from epd_engine.models.registry import family_of
from tests.support.sounds import RATE, SECONDS, AudioReference, hear, tone, wav

CPU = torch.device("cpu")
TOWER_PREFIXES = tuple(Qwen2Audio.tower_names)


def waveform(seconds: float, seed: int = 0, rate: int = RATE) -> Waveform:
    """What is left of a tone in 16 bits, as a decoder gives it."""
    return Waveform((tone(seconds, seed, rate)[:, 0] * 32767).astype("<i2").astype(np.float32) / 32768, rate)


@pytest.fixture
def family(audio_model: Path) -> Qwen2Audio:
    return Qwen2Audio(Checkpoint(audio_model), torch.float32, CPU)


@pytest.fixture
def copy(audio_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(audio_model, tmp_path / "model"))


def change(folder: Path, name: str, **fields: object) -> None:
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**document, **fields}))


def test_the_registry_knows_it(audio_model: Path) -> None:
    assert family_of(Checkpoint(audio_model)) is Qwen2Audio


def test_an_encoder_reads_tower_and_projector_and_nothing_else(family: Qwen2Audio) -> None:
    family.load_tower()
    read = family.checkpoint.tensors_read
    assert any("audio_tower" in name for name in read)
    assert any("multi_modal_projector" in name for name in read)
    assert all(name.startswith(TOWER_PREFIXES) for name in read)
    names = [n for m in family.modules() for n, _ in m.named_parameters()]
    assert not any("lm_head" in n or "embed_tokens" in n for n in names)


def test_a_language_model_reads_no_tower(family: Qwen2Audio) -> None:
    family.load_language()
    assert not any(name.startswith(TOWER_PREFIXES) for name in family.checkpoint.tensors_read)
    assert len(family.modules()) == 1


def test_both_together_are_the_whole_checkpoint(family: Qwen2Audio) -> None:
    family.load_tower()
    family.load_language()
    assert family.checkpoint.tensors_read == set(family.checkpoint.tensor_files)
    assert not any(p.is_meta for m in family.modules() for p in m.parameters())


def test_checkpoints_in_transformers_newer_names_are_read_too(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    renamed = {
        "lm_head.weight" if "lm_head" in name else "model." + name.replace("model.model.", "model."): tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, copy / "model.safetensors", {"format": "pt"})
    assert "model.language_model.embed_tokens.weight" in renamed
    family = Qwen2Audio(Checkpoint(copy), torch.float32, CPU)
    family.load_tower()
    family.load_language()
    assert family.checkpoint.tensors_read == set(renamed)


def test_encoder_outputs_equal_transformers_whatever_is_in_the_batch(
    family: Qwen2Audio, audio_reference: AudioReference
) -> None:
    family.load_tower()
    lengths = (2.0, 0.3, SECONDS, 0.0201, 5.123)
    items = [family.process("audio", waveform(n, i), {}) for i, n in enumerate(lengths)]
    together = family.encode([item.features for item in items])
    for i, (output, item) in enumerate(zip(together, items, strict=True)):
        assert output.shape == (item.num_embeds, family.embed_width)
        (alone,) = family.encode([item.features])
        torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)
        wanted = transformers_embeds(audio_reference, wav(tone(lengths[i], i)))
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)


def transformers_embeds(reference: AudioReference, data: bytes) -> torch.Tensor:
    """What the language model gets at the placeholders of one sound."""
    inputs = reference.inputs([hear(data)])
    seen: list[torch.Tensor] = []
    layer = reference.model.model.language_model
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        reference.model(**inputs)
    hook.remove()
    is_sound = inputs["input_ids"][0] == reference.model.config.audio_token_id
    return seen[0][0, is_sound]


def test_in_bfloat16_outputs_stay_near_those_in_float32(audio_model: Path, family: Qwen2Audio) -> None:
    half = Qwen2Audio(Checkpoint(audio_model), torch.bfloat16, CPU)
    items = [family.process("audio", waveform(n, i), {}) for i, n in enumerate((2.0, 0.3))]
    outputs = []
    for loaded in (family, half):
        loaded.load_tower()
        outputs.append(torch.cat(loaded.encode([item.features for item in items])).float())
    assert (outputs[1] - outputs[0]).norm() < 0.03 * outputs[0].norm()


def test_padding_has_no_part_in_the_output(family: Qwen2Audio) -> None:
    """Attention from sound to padding would show here, but not in a batch of one."""
    family.load_tower()
    item = family.process("audio", waveform(2), {})
    spoiled = dict(item.features)
    spoiled["input_features"] = item.features["input_features"].clone()
    beyond = 2 * ((int(item.features["num_frames"]) - 1) // 2 + 1) + 1
    spoiled["input_features"] = torch.nn.functional.pad(
        spoiled["input_features"][..., :beyond], (0, 50), value=3
    )
    torch.testing.assert_close(*family.encode([item.features]), *family.encode([spoiled]))


def test_other_sounds_have_other_outputs(family: Qwen2Audio) -> None:
    family.load_tower()
    first, second = family.encode([family.process("audio", waveform(1, i), {}).features for i in (1, 2)])
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_sound_at_another_rate_gets_as_many_tokens(family: Qwen2Audio, rate: int) -> None:
    assert family.process("audio", waveform(3, rate=rate), {}).metadata == {"audio_num_tokens": 75}


@pytest.mark.parametrize("seconds", [0.0201, 0.06, 0.061, 0.0999, 1, 3.333, 7.99, SECONDS])
def test_token_counts_equal_transformers(
    family: Qwen2Audio, audio_reference: AudioReference, seconds: float
) -> None:
    item = family.process("audio", waveform(seconds), {})
    ids = audio_reference.inputs([hear(wav(tone(seconds)))])["input_ids"][0]
    count = int((ids == family.placeholder_token("audio")).sum())
    assert item.metadata == {"audio_num_tokens": count}
    assert item.num_embeds == family.num_embeds("audio", item.metadata) == count


def test_positions_count_tokens(family: Qwen2Audio) -> None:
    positions, delta = family.positions(7, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert delta == 0


@pytest.mark.parametrize("count", [None, 0, -1, 201, 1 << 40, True, 3.0, "3", [3]])
def test_malformed_metadata_is_refused(family: Qwen2Audio, count: object) -> None:
    with pytest.raises(MediaRefused, match="audio_num_tokens must be an integer from 1 to 200"):
        family.num_embeds("audio", {"audio_num_tokens": count})


def test_metadata_beside_the_count_is_refused(family: Qwen2Audio) -> None:
    with pytest.raises(MediaRefused, match="'more' is not known"):
        family.num_embeds("audio", {"audio_num_tokens": 3, "more": "x" * 100_000})


@pytest.mark.parametrize(
    ("sound", "match"),
    [
        (waveform(0), r"0\.0000 seconds; the model needs at least 0\.0201"),
        (waveform(0.02), "needs at least"),
        (waveform(SECONDS + 0.001), r"8\.001 seconds; the model takes at most 8"),
        (Waveform(np.full(RATE, 1e30, np.float32), RATE), "too large for a spectrogram"),
    ],
)
def test_sounds_that_the_model_cannot_take_are_refused(
    family: Qwen2Audio, sound: Waveform, match: str
) -> None:
    with pytest.raises(MediaRefused, match=match):
        family.process("audio", sound, {})


def test_processor_options_are_refused_by_name(family: Qwen2Audio) -> None:
    with pytest.raises(MediaRefused, match="'max_pixels' is not known"):
        family.process("audio", waveform(1), {"max_pixels": 4})


def test_a_blank_sound_goes_through(family: Qwen2Audio) -> None:
    family.load_tower()
    (output,) = family.encode([family.process("audio", family.blank("audio"), {}).features])
    assert torch.isfinite(output).all()


def test_a_feature_extractor_that_does_not_fit_the_tower_is_named(copy: Path) -> None:
    change(copy, "preprocessor_config.json", chunk_length=30)
    with pytest.raises(CheckpointError, match="makes 3000 frames of 30 seconds, but a tower of 400"):
        Qwen2Audio(Checkpoint(copy), torch.float32, CPU).blank("audio")


def test_a_sliding_window_is_refused(copy: Path) -> None:
    document = json.loads((copy / "config.json").read_text())
    text = {**document["text_config"], "use_sliding_window": True, "sliding_window": 64}
    text |= {"layer_types": ["sliding_attention"] * 3}
    change(copy, "config.json", text_config=text)
    with pytest.raises(CheckpointError, match="sliding-window"):
        Qwen2Audio(Checkpoint(copy), torch.float32, CPU)


@pytest.mark.parametrize("part", ["audio_tower.conv1.weight", "multi_modal_projector.linear.bias"])
def test_the_fingerprint_covers_tower_and_projector(copy: Path, part: str) -> None:
    before = model_fingerprint(Checkpoint(copy), TOWER_PREFIXES)
    weights = load_file(copy / "model.safetensors")
    weights[part].view(-1)[0] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert model_fingerprint(Checkpoint(copy), TOWER_PREFIXES) != before
