"""Which modules of transformers' models are replaced, once their weights are loaded."""

from typing import Any

from torch import nn

from epd_engine.attention.choice import choose_segments
from epd_engine.layers.blocks import DecoderLayer, VisionBlock
from epd_engine.layers.rms_norm import RMSNorm
from epd_engine.layers.rotary import Turns

# A decoder layer of which `DecoderLayer` knows all there is.
QWEN2_LAYER = {
    *("", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj", "act_fn")),
}


def fuse_language(model: Any) -> None:
    """Of a text model built as `Qwen2Model` is; any other stays as it is."""
    if any({name for name, _ in layer.named_modules()} != QWEN2_LAYER for layer in model.layers):
        return
    last = len(model.layers) - 1
    model.layers = nn.ModuleList(
        DecoderLayer(layer, is_last=at == last) for at, layer in enumerate(model.layers)
    )
    model.norm = RMSNorm(model.norm)
    model.rotary_emb = Turns(model.rotary_emb)


def fuse_vision(tower: Any) -> None:
    """Of Qwen2.5-VL's tower."""
    attention = tower.blocks[0].attn
    attend = choose_segments(attention.qkv.weight, attention.num_heads, attention.head_dim)
    tower.blocks = nn.ModuleList(VisionBlock(block, attend) for block in tower.blocks)
    tower.merger.ln_q = RMSNorm(tower.merger.ln_q)
    tower.rotary_pos_emb = Turns(tower.rotary_pos_emb)
