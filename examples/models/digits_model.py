"""Shape of the digits model: Qwen2.5-VL at toy size, with its tokenizer and processor files.

Head sizes are 32 in the text and in the vision part, the smallest that vLLM's CPU backend runs.
"""

import json
from pathlib import Path

import torch
from examples.models import digits_chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

MODEL_DIR = Path(__file__).parent / "digits-vl"

PADDING = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
# Their ids are their places here, before every other token.
SPECIAL_TOKENS = (
    PADDING,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 512
CONTEXT = 8192

PATCH = 14
MERGE = 2
CELL = PATCH * MERGE  # edge of the square of pixels behind one image token
# A scan has 8 by 8 pixels: a larger picture would cost tokens and show no more.
MIN_PIXELS = (2 * CELL) ** 2
# Three cells by three, and some room: resizing rounds down, and at the bare square of 84 it would
# make two cells of the shorter edge of every picture that is not exactly square.
MAX_PIXELS = (3 * CELL + 4) ** 2

# About one over the root of the width. The customary 0.02 starves a model as narrow as this one.
INIT_STD = 0.08

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type in ('video', 'video_url') %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
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


def tokenizer_config() -> dict:
    """`tokenizer_config.json` in the form that transformers 4 and 5 both read.

    What transformers 5 writes itself names a class and a key that only it knows.
    """
    return {
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (END_OF_TURN, PADDING)],
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": CONTEXT,
        "pad_token": PADDING,
        "processor_class": "Qwen2_5_VLProcessor",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the byte-level BPE of `VOCAB_SIZE` tokens; any text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(digits_chat.corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


def build_config() -> Qwen2_5_VLConfig:
    """1.4 million parameters: 5.5 MB in float32."""
    ids = {token: place for place, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "initializer_range": INIT_STD,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            # Sections of time, height and width sum to half of the head size.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": None,
            "eos_token_id": ids[END_OF_TURN],
            "pad_token_id": ids[PADDING],
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "initializer_range": INIT_STD,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            # Block 0 attends within windows, block 1 over the whole picture.
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        # Untied: loaders differ in where they look for the tie in nested configs.
        tie_word_embeddings=False,
        dtype="float32",
    )


def build_model() -> Qwen2_5_VLForConditionalGeneration:
    """Freshly drawn float32 weights; seed torch before."""
    model = Qwen2_5_VLForConditionalGeneration(build_config()).to(torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=model.config.text_config.eos_token_id,
        pad_token_id=model.config.text_config.pad_token_id,
    )
    return model


def processor_files() -> dict[str, dict]:
    """The processor's configuration, by file name.

    Written as plain JSON, for the classes that would write the video part cannot be imported
    without torchvision. `AutoImageProcessor` takes its PIL backend for the same file there.
    """
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
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "temporal_patch_size": 2,
    }
    return {
        "preprocessor_config.json": pixels | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": pixels | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the whole checkpoint: weights, configs, tokenizer, template and processor files."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in {**processor_files(), "tokenizer_config.json": tokenizer_config()}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
