"""Which architectures the engine can run."""

import importlib

from epd_engine.models.base import ModelFamily
from epd_engine.models.checkpoint import Checkpoint, CheckpointError

FAMILIES = {
    "Qwen2_5_VLForConditionalGeneration": ("epd_engine.models.qwen2_5_vl", "Qwen2_5_VL"),
    "Qwen2AudioForConditionalGeneration": ("epd_engine.models.qwen2_audio", "Qwen2Audio"),
}


def family_of(checkpoint: Checkpoint) -> type[ModelFamily]:
    """The family class of a checkpoint. Raises `CheckpointError` for an architecture nobody wrote."""
    if checkpoint.architecture not in FAMILIES:
        raise CheckpointError(
            f"the architecture {checkpoint.architecture!r} is not supported; known are {', '.join(FAMILIES)}"
        )
    module, name = FAMILIES[checkpoint.architecture]
    family: type[ModelFamily] = getattr(importlib.import_module(module), name)
    return family
