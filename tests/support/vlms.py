"""Tiny vision-language models of random weights in the families that only vLLM runs here.

As `benchmarks/make_model.py` makes those that our engine runs too, with its tokenizer and sizes. Processors
are written as JSON, since their classes need torchvision.
"""

import json
from pathlib import Path
from typing import Any

import torch
from benchmarks.make_model import (
    END_OF_TURN,
    HEAD,
    IDS,
    MERGE,
    PADDING,
    SIZES,
    make_tokenizer,
    text_config,
    tokenizer_config,
)
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SIZE = SIZES["tiny"]
DEEPSTACK = (0, 1)
"""Layers of the tower whose output travels beside the last one's: entries are three times as wide."""

_QWEN3_PATCH = 16
_LLAVA_PATCH, _LLAVA_PIXELS = 14, 224


def make_qwen3_vl(folder: Path, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder`."""
    tokenizer = make_tokenizer("qwen2_5_vl")
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    config = Qwen3VLConfig(
        text_config={**text_config(SIZE, len(tokenizer)), "head_dim": HEAD, "rope_parameters": rope},
        vision_config={
            "depth": SIZE.tower_layers,
            "hidden_size": SIZE.tower_hidden,
            "intermediate_size": SIZE.tower_mlp,
            "num_heads": SIZE.tower_hidden // HEAD,
            "out_hidden_size": SIZE.hidden,
            "patch_size": _QWEN3_PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(DEEPSTACK),
            "initializer_range": SIZE.tower_hidden**-0.5,
        },
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    unit = (MERGE * _QWEN3_PATCH) ** 2
    pixels = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": _QWEN3_PATCH,
        "processor_class": "Qwen3VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 4 * unit, "longest_edge": 1280 * unit},
        "temporal_patch_size": 2,
    }
    processor = {
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    return _write(folder, Qwen3VLForConditionalGeneration, config, tokenizer, processor, seed)


def make_llava(folder: Path, seed: int = 0) -> Path:
    """Writes the checkpoint into `folder`. Every picture is 256 embeddings."""
    tokenizer = make_tokenizer("qwen2_5_vl")
    # The processor repeats the one image token; nothing stands around it.
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"
    )
    text = text_config(SIZE, len(tokenizer))
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=SIZE.tower_hidden,
            intermediate_size=SIZE.tower_mlp,
            projection_dim=SIZE.tower_hidden,
            num_hidden_layers=SIZE.tower_layers,
            num_attention_heads=SIZE.tower_hidden // HEAD,
            image_size=_LLAVA_PIXELS,
            patch_size=_LLAVA_PATCH,
            initializer_range=SIZE.tower_hidden**-0.5,
            initializer_factor=4.0,
        ),
        text_config=LlamaConfig(**text),
        image_token_index=IDS["<|image_pad|>"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(_LLAVA_PIXELS // _LLAVA_PATCH) ** 2,
    )
    processor = {
        "preprocessor_config.json": {
            "crop_size": {"height": _LLAVA_PIXELS, "width": _LLAVA_PIXELS},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "CLIPImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": _LLAVA_PIXELS},
        },
        "processor_config.json": {
            "image_token": "<|image_pad|>",
            "num_additional_image_tokens": 1,
            "patch_size": _LLAVA_PATCH,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    }
    _write(folder, LlavaForConditionalGeneration, config, tokenizer, processor, seed)
    _use_hub_names(folder / "model.safetensors")
    return folder


def _write(
    folder: Path, model_class: Any, config: Any, tokenizer: Any, processor: dict[str, Any], seed: int
) -> Path:
    torch.manual_seed(seed)
    model = model_class(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=IDS[END_OF_TURN], pad_token_id=IDS[PADDING]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in {**processor, "tokenizer_config.json": tokenizer_config()}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder


def _use_hub_names(path: Path) -> None:
    """vLLM knows LLaVA's tower by the names that checkpoints on the hub have; transformers reads them too."""
    old, new = "vision_tower.", "vision_tower.vision_model."
    weights = {
        name.replace(old, new, 1) if name.startswith(old) and not name.startswith(new) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
