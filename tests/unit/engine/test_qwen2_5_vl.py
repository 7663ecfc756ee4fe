"""The family module against transformers' own model: loading, positions, encoder outputs, sizes."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from epd_engine.core.request import MediaItem
from epd_engine.layers.blocks import DecoderLayer, VisionBlock
from epd_engine.models.base import MediaRefused
from epd_engine.models.checkpoint import Checkpoint, CheckpointError
from epd_engine.models.fingerprint import model_fingerprint
from epd_engine.models.qwen2_5_vl import Qwen2_5_VL
from epd_engine.models.registry import family_of
from tests.support.digits import MODEL, Reference

CPU = torch.device("cpu")
TOWER_PREFIXES = tuple(Qwen2_5_VL.tower_names)


def family(folder: Path = MODEL) -> Qwen2_5_VL:
    return Qwen2_5_VL(Checkpoint(folder), torch.float32, CPU)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def test_an_encoder_reads_the_tower_and_nothing_else() -> None:
    loaded = family()
    loaded.load_tower()
    assert loaded.checkpoint.tensors_read
    assert all(name.startswith(TOWER_PREFIXES) for name in loaded.checkpoint.tensors_read)
    names = [n for m in loaded.modules() for n, _ in m.named_parameters()]
    assert names
    assert not any("lm_head" in n or "embed_tokens" in n for n in names)


def test_patches_are_projected_by_a_matrix_product() -> None:
    """A convolution over single patches is one, and takes a hundred times as long on a CPU."""
    loaded = family()
    loaded.load_tower()
    assert not [m for m in loaded.tower.modules() if isinstance(m, torch.nn.Conv3d)]


def test_layers_are_those_of_few_passes() -> None:
    loaded = family()
    loaded.load_tower()
    loaded.load_language()
    kinds = Counter(type(module) for part in loaded.modules() for module in part.modules())
    vision, text = loaded.checkpoint.config["vision_config"], loaded.checkpoint.config["text_config"]
    assert kinds[VisionBlock] == vision["depth"]
    assert kinds[DecoderLayer] == text["num_hidden_layers"]


def test_a_language_model_reads_no_tower() -> None:
    loaded = family()
    loaded.load_language()
    assert not any(name.startswith(TOWER_PREFIXES) for name in loaded.checkpoint.tensors_read)
    assert len(loaded.modules()) == 1


def test_both_together_are_the_whole_checkpoint() -> None:
    loaded = family()
    loaded.load_tower()
    loaded.load_language()
    assert loaded.checkpoint.tensors_read == set(loaded.checkpoint.tensor_files)
    assert not any(p.is_meta for m in loaded.modules() for p in m.parameters())


def test_encoder_outputs_equal_transformers_whatever_is_in_the_batch(reference: Reference) -> None:
    loaded = family()
    loaded.load_tower()
    pictures = [Image.effect_noise(size, 80).convert("RGB") for size in ((60, 60), (200, 40), (112, 90))]
    features = [loaded.process("image", p, {}) for p in pictures]
    for output, item in zip(loaded.encode([f.features for f in features]), features, strict=True):
        wanted = reference.model.model.get_image_features(**item.features).pooler_output[0]
        assert output.shape == (item.num_embeds, loaded.embed_width)
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        [5],
        [("g", 2, 2)],
        [3, ("g", 4, 6), 5],
        [1, ("g", 8, 2), ("g", 2, 8), 4],
        [2, ("g", 4, 4), 7, ("g", 2, 10), ("g", 6, 6), 1],
    ],
)
def test_positions_equal_transformers(reference: Reference, layout: list) -> None:
    pad, tokens, media = reference.model.config.image_token_id, [], []
    for part in layout:
        if isinstance(part, int):
            tokens += [100] * part
        else:
            _, h, w = part
            media.append(MediaItem("image", "k", h * w // 4, {"image_grid_thw": [1, h, w]}, len(tokens)))
            tokens += [pad] * (h * w // 4)
    positions, delta = family().positions(len(tokens), media)
    ids = torch.tensor([tokens])
    # transformers groups adjacent placeholders into one picture: separate them there by hand.
    if any(a.end == b.offset for a, b in itertools.pairwise(media)):
        wanted = adjacent_positions(media, len(tokens))
        assert torch.equal(positions, wanted)
        return
    grids = torch.tensor([m.metadata["image_grid_thw"] for m in media]) if media else None
    wanted, wanted_delta = reference.model.model.get_rope_index(ids, (ids == pad).int(), grids)
    assert torch.equal(positions, wanted[:, 0])
    assert delta == int(wanted_delta)


def adjacent_positions(media: list[MediaItem], length: int) -> torch.Tensor:
    """Positions written out by the rule of the paper, cell by cell."""
    rows, start, token = [], 0, 0
    for item in media:
        while token < item.offset:
            rows.append((start, start, start))
            start, token = start + 1, token + 1
        _, h, w = item.metadata["image_grid_thw"]
        rows += [(start, start + y, start + x) for y in range(h // 2) for x in range(w // 2)]
        token, start = item.end, start + max(h, w) // 2
    while token < length:
        rows.append((start, start, start))
        start, token = start + 1, token + 1
    return torch.tensor(rows).T


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"image_grid_thw": None},
        {"image_grid_thw": [1, 2]},
        {"image_grid_thw": [1, 2, "2"]},
        {"image_grid_thw": [1, 2, True]},
        {"image_grid_thw": [1, 0, 2]},
        {"image_grid_thw": [1, -2, 2]},
        {"image_grid_thw": [1, 3, 2]},
        {"image_grid_thw": [2, 2, 2]},
        {"image_grid_thw": [1, 1 << 20, 1 << 20]},
        {"image_grid_thw": [1, 2.0, 2]},
        {"image_grid_thw": [1, 2, 2], "more": float("nan")},
    ],
)
def test_malformed_metadata_is_refused(metadata: dict) -> None:
    with pytest.raises(MediaRefused, match="image_grid_thw"):
        family().num_embeds("image", metadata)


def test_an_aspect_ratio_beyond_the_processor_is_refused() -> None:
    with pytest.raises(MediaRefused, match="refuses this picture"):
        family().process("image", Image.new("RGB", (3000, 1)), {})


def test_unknown_processor_options_are_refused_and_known_ones_change_the_size() -> None:
    picture = Image.new("RGB", (400, 400))
    with pytest.raises(MediaRefused, match="'max_pixel' is not known"):
        family().process("image", picture, {"max_pixel": 1})
    for bad in ({"max_pixels": 0}, {"max_pixels": 1 << 40}, {"max_pixels": "9"}, {"min_pixels": 20_000}):
        with pytest.raises(MediaRefused, match="pixels"):
            family().process("image", picture, bad)
    small = family().process("image", picture, {"min_pixels": 28 * 28, "max_pixels": 56 * 56})
    assert small.num_embeds == 4


class TestFingerprint:
    def of(self, folder: Path) -> str:
        return model_fingerprint(Checkpoint(folder), TOWER_PREFIXES)

    def test_it_does_not_depend_on_the_path(self, copy: Path) -> None:
        assert self.of(copy) == self.of(MODEL)

    def test_it_is_the_same_when_computed_and_when_cached(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert self.of(copy) == self.of(copy) == self.of(MODEL)

    def test_other_tower_weights_have_another_fingerprint(self, copy: Path) -> None:
        before = self.of(copy)
        weights = copy / "model.safetensors"
        data = bytearray(weights.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = next(n for n in header if n.startswith(TOWER_PREFIXES))
        data[8 + length + header[name]["data_offsets"][0]] ^= 1
        weights.write_bytes(data)
        assert self.of(copy) != before

    def test_other_processor_settings_have_another_fingerprint(self, copy: Path) -> None:
        before = self.of(copy)
        settings = copy / "preprocessor_config.json"
        settings.write_text(settings.read_text().replace("0.5", "0.25"))
        assert self.of(copy) != before

    def test_the_version_that_wrote_the_config_does_not_matter(self, copy: Path) -> None:
        before = self.of(copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0.0"}))
        assert self.of(copy) == before


class TestCheckpoint:
    def test_an_unknown_architecture_is_named(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
        with pytest.raises(CheckpointError, match="'Other' is not supported; known are Qwen2_5"):
            family_of(Checkpoint(copy))

    def test_a_missing_folder_is_named(self) -> None:
        with pytest.raises(CheckpointError, match="neither a folder nor a model"):
            Checkpoint.find("no/such/model/anywhere")

    def test_a_folder_without_weights_is_named(self, copy: Path) -> None:
        (copy / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="only safetensors"):
            Checkpoint(copy)

    def test_damaged_weights_are_named(self, copy: Path) -> None:
        (copy / "model.safetensors").write_bytes(b"x" * 100)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint(copy)

    def test_a_config_that_does_not_fit_the_weights_is_named(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        config["text_config"]["intermediate_size"] *= 2
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="but the config says"):
            family(copy).load_language()

    def test_a_config_with_a_wrong_type_is_named(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        config["text_config"]["hidden_size"] = "wide"
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"config.json is no Qwen2_5_VLConfig.*hidden_size"):
            family(copy)

    def test_missing_tensors_are_counted(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] += 1
        config["text_config"]["layer_types"].append("full_attention")
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="lacks 12 tensors"):
            family(copy).load_language()


@pytest.mark.parametrize(
    "changes", [{}, {"do_normalize": False}, {"do_rescale": False, "do_normalize": False}]
)
def test_pixels_are_what_transformers_own_processor_makes(copy: Path, changes: dict[str, bool]) -> None:
    path = copy / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    loaded = family(copy)
    picture = Image.effect_noise((90, 61), 80).convert("RGB")
    own = AutoImageProcessor.from_pretrained(copy, backend="pil")(images=[picture], return_tensors="pt")
    found = loaded.process("image", picture, {}).features["pixel_values"]
    torch.testing.assert_close(found, own["pixel_values"], rtol=1e-5, atol=1e-6)
