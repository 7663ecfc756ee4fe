"""Outputs of the tower that must not be shared, and what the others of their batch see of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

from epd_engine.core.request import MediaItem
from epd_engine.models.checkpoint import Checkpoint
from epd_engine.models.qwen2_5_vl import Qwen2_5_VL
from epd_engine.worker import encoder_runner
from epd_engine.worker.encoder_runner import EncoderRunner
from tests.support.digits import MODEL
from tests.support.engine_objects import key

Features = Mapping[str, torch.Tensor]


class Faulty(Qwen2_5_VL):
    """The shipped model's tower, with a fault at one grid."""

    fault = ""

    def encode(self, batch: Sequence[Features]) -> list[torch.Tensor]:
        outputs = super().encode(batch)
        for at, features in enumerate(batch):
            if features["image_grid_thw"].flatten().tolist() != [1, 4, 4]:
                continue
            if self.fault == "raises":
                raise RuntimeError("no memory for this one")
            outputs[at] = outputs[at][:-1] if self.fault == "rows" else outputs[at] * float(self.fault)
        return outputs


@pytest.fixture(scope="module")
def family() -> Faulty:
    loaded = Faulty(Checkpoint(MODEL), torch.float32, torch.device("cpu"))
    loaded.load_tower()
    return loaded


def picture(family: Faulty, name: str, size: int) -> MediaItem:
    pixels: dict[str, Any] = {"min_pixels": size**2, "max_pixels": size**2}
    made = family.process("image", Image.new("RGB", (size, size), name), pixels)
    return MediaItem("image", key(name), made.num_embeds, made.metadata, features=made.features)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "NaN or infinity"),
        ("inf", "NaN or infinity"),
        ("rows", "expected"),
        ("raises", "the encoder failed on it: no memory for this one"),
    ],
)
def test_one_bad_output_is_kept_from_everybody_and_the_others_are_as_alone(
    family: Faulty, fault: str, reason: str
) -> None:
    red, blue, bad = (
        picture(family, name, size) for name, size in (("red", 112), ("blue", 84), ("green", 56))
    )
    assert bad.metadata == {"image_grid_thw": [1, 4, 4]}
    family.fault = "1"
    alone: dict[str, torch.Tensor] = {}
    for item in (red, blue):
        assert EncoderRunner(family, alone).run([item]) == {}
    family.fault = fault
    together: dict[str, torch.Tensor] = {}
    errors = EncoderRunner(family, together).run([red, bad, blue])
    assert list(errors) == [bad.mm_hash]
    assert reason in errors[bad.mm_hash]
    assert set(together) == {red.mm_hash, blue.mm_hash}
    for name, output in together.items():
        torch.testing.assert_close(output, alone[name], atol=1e-4, rtol=1e-4)


def test_a_device_that_is_gone_is_no_fault_of_the_items(
    family: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an encoder would answer 500 for ever: whoever runs the step ends, and is started anew."""

    def gone(_: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    family.fault = "raises"
    monkeypatch.setattr(encoder_runner, "check_alive", gone)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        EncoderRunner(family, {}).run([picture(family, "green", 56)])
