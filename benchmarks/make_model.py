"""Writes a checkpoint of random weights to disk, complete with tokenizer, processor config and chat template.

    python benchmarks/make_model.py OUT [--family qwen2_5_vl | qwen2_audio] [--size tiny | small | 100m]
                                    [--seed N] [--dtype float32 | bfloat16 | float16]

Nothing is downloaded. Weights are drawn wider than a trained model's, or else a random model's answer would
hardly depend on the picture or the sound.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.utils import logging

CONTEXT = 8192
PADDING, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
# Their ids are their places here, before every other token.
SPECIAL_TOKENS = (
    PADDING,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_bos|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
)
IDS = {token: place for place, token in enumerate(SPECIAL_TOKENS)}
PATCH, MERGE = 14, 2

CORPUS = """\
You are a helpful assistant. What is in this picture? The picture shows a red square, a blue circle and a
green triangle on a white ground. What do you hear? A bell rings twice, a dog barks, somebody speaks, then
music begins. Compare the two and say how they differ. One of them is darker, larger, louder, longer or
farther away. Answer in a few words. How many things can be seen or heard? Which comes first? Thank you.
"""

# What stands in a message for one item.
IMAGE_ITEM = "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
AUDIO_ITEM = """\
{%- set sounds.count = sounds.count + 1 %}
                {{- 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}"""
CHAT_TEMPLATE = """\
{%- set sounds = namespace(count=0) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type == 'MODALITY' %}
                ITEM
            {%- else %}
                {{- raise_exception('unknown type of content part: ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Size:
    """Widths, depths and MLP widths; heads have 32 dimensions, the least that vLLM's CPU build runs."""

    hidden: int
    layers: int
    kv_heads: int
    mlp: int
    tower_hidden: int
    tower_layers: int
    tower_mlp: int
    audio_seconds: int
    is_tied: bool = False


SIZES = {
    "tiny": Size(128, 3, 2, 256, 128, 2, 256, audio_seconds=8),
    "small": Size(384, 6, 4, 1024, 256, 4, 768, audio_seconds=30),
    "100m": Size(768, 12, 8, 2048, 512, 8, 1408, audio_seconds=30),
}
HEAD = 32


def make(
    folder: Path,
    family: str,
    size: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    is_tied: bool = False,
) -> int:
    """Writes the checkpoint into `folder`; returns the number of parameters. The head of a tied model is its
    token embedding."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(family)
    model, processor = FAMILIES[family](replace(SIZES[size], is_tied=is_tied), len(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=IDS[END_OF_TURN], pad_token_id=IDS[PADDING]
    )
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in {**processor, "tokenizer_config.json": tokenizer_config()}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return sum(p.numel() for p in model.parameters())


def make_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    modality, item = ("audio", AUDIO_ITEM) if family == "qwen2_audio" else ("image", IMAGE_ITEM)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE.replace("MODALITY", modality).replace("ITEM", item),
        model_max_length=CONTEXT,
    )


def tokenizer_config() -> dict:
    """In the form that transformers 4 and 5 both read."""
    return {
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (END_OF_TURN, PADDING)],
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": CONTEXT,
        "pad_token": PADDING,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def text_config(size: Size, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // HEAD,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "initializer_range": size.hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": IDS[END_OF_TURN],
        "pad_token_id": IDS[PADDING],
        "tie_word_embeddings": size.is_tied,
    }


def qwen2_5_vl(size: Size, vocab_size: int) -> tuple[Any, dict[str, Any]]:
    """The model, and the processor's files by name."""
    # Sections of time, height and width sum to half of the head size.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config={**text_config(size, vocab_size), "rope_parameters": rope},
        vision_config={
            "depth": size.tower_layers,
            "hidden_size": size.tower_hidden,
            "intermediate_size": size.tower_mlp,
            "num_heads": size.tower_hidden // HEAD,
            "out_hidden_size": size.hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            # The others attend within windows.
            "fullatt_block_indexes": [i for i in range(size.tower_layers) if i % 4 == 3 or i == 1],
            "initializer_range": size.tower_hidden**-0.5,
        },
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=size.is_tied,
    )
    # Plain JSON: the classes that would write the video part cannot be imported without torchvision.
    pixels = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "processor_class": "Qwen2_5_VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28},
        "temporal_patch_size": 2,
    }
    return Qwen2_5_VLForConditionalGeneration(config), {
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }


def qwen2_audio(size: Size, vocab_size: int) -> tuple[Any, dict[str, Any]]:
    """The model, and the processor's files by name."""
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=size.audio_seconds)
    config = Qwen2AudioConfig(
        text_config={**text_config(size, vocab_size), "model_type": "qwen2"},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": extractor.feature_size,
            "encoder_layers": size.tower_layers,
            "encoder_attention_heads": size.tower_hidden // HEAD,
            "encoder_ffn_dim": size.tower_mlp,
            "d_model": size.tower_hidden,
            "max_source_positions": extractor.nb_max_frames // 2,
            "initializer_range": size.tower_hidden**-0.5,
        },
        audio_token_index=IDS["<|AUDIO|>"],
    )
    processor = {
        "chunk_length": extractor.chunk_length,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": extractor.feature_size,
        "hop_length": extractor.hop_length,
        "n_fft": extractor.n_fft,
        "n_samples": extractor.n_samples,
        "nb_max_frames": extractor.nb_max_frames,
        "padding_side": "right",
        "padding_value": 0.0,
        "processor_class": "Qwen2AudioProcessor",
        "return_attention_mask": True,
        "sampling_rate": extractor.sampling_rate,
    }
    return Qwen2AudioForConditionalGeneration(config), {"preprocessor_config.json": processor}


FAMILIES: dict[str, Callable[[Size, int], tuple[Any, dict[str, Any]]]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_audio": qwen2_audio,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    chosen = parser.parse_args()
    logging.disable_progress_bar()
    count = make(chosen.out, chosen.family, chosen.size, chosen.seed, getattr(torch, chosen.dtype))
    print(f"{chosen.out}: {chosen.family}, {count / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
