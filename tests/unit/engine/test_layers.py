"""The layers that stand in for transformers', beside transformers' own."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2Model, Qwen2RotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from epd_engine.attention.kv_cache import KVCache
from epd_engine.attention.packed_batch import PackedBatch, Span
from epd_engine.layers.blocks import DecoderLayer
from epd_engine.layers.fuse import fuse_language, fuse_vision
from epd_engine.layers.gated_mlp import GatedMLP
from epd_engine.layers.packed_linear import PackedLinear, add_linear, pack_linears
from epd_engine.layers.rms_norm import RMSNorm
from epd_engine.layers.rotary import Turns, pairs_side_by_side, turn
from epd_engine.models.language import LanguageModel

HEAD = 16
EXACT, ROUNDED = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def text_config(**changes: Any) -> Qwen2Config:
    said = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "attn_implementation": "sdpa",
    }
    return Qwen2Config(**said | changes)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square, as a share of what was wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def shaken(module: nn.Module) -> nn.Module:
    """With norms and biases that are not all one and zero."""
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + 0.1)
    return module.eval().requires_grad_(False)


def assert_as_good(fused: Any, own: Any, exactly: torch.Tensor) -> None:
    """In bfloat16 both round; ours may not be the worse of the two."""
    assert error(fused, exactly) < max(1.1 * error(own, exactly), 1e-6)


def test_a_language_model_computes_the_same() -> None:
    config = text_config()
    own = shaken(Qwen2Model(config))
    embeds, positions = torch.randn(1, 9, 64), torch.arange(3, 12)[None]
    wanted = own(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
    fuse_language(own)
    assert isinstance(own.layers[0], DecoderLayer)
    found = own(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
    assert error(found, wanted) < 1e-5


def test_the_last_layer_goes_on_with_wanted_tokens_alone() -> None:
    config = text_config()
    own = shaken(Qwen2Model(config))
    embeds, positions = torch.randn(9, 64), torch.arange(9)[None]
    exact = own(inputs_embeds=embeds[None], position_ids=positions, use_cache=False).last_hidden_state[0]
    model = LanguageModel(own, tied=True)
    fuse_language(own)
    rows: list[int] = []
    for layer in own.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, out: rows.append(out.shape[1]))
    kv = KVCache(
        num_layers=2,
        num_blocks=4,
        block_size=4,
        kv_heads=2,
        head_dim=HEAD,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for begin, end, is_wanted in ((0, 5, False), (5, 9, True)):
        batch = PackedBatch(kv, [Span(0, begin, end, [2, 0, 3], is_wanted)])
        found = model.hidden(embeds[begin:end], positions[:, begin:end], batch)
    assert error(found, exact[8:]) < 1e-5
    assert rows == [5, 0, 4, 1]


def test_a_layer_with_parts_that_are_not_known_is_left_alone() -> None:
    model = Qwen2Model(text_config())
    model.layers[1].self_attn.q_norm = nn.Identity()
    fuse_language(model)
    assert not any(isinstance(module, DecoderLayer | RMSNorm | Turns) for module in model.modules())


def test_a_packed_decoder_layer_rounds_no_worse() -> None:
    config = text_config()
    exact = shaken(Qwen2DecoderLayer(config, 0))
    rotary = Qwen2RotaryEmbedding(config)
    x, positions = torch.randn(1, 40, 64).bfloat16(), torch.arange(40)[None]
    wanted = exact(x.float(), attention_mask=None, position_embeddings=rotary(x.float(), positions))
    own = exact.to(ROUNDED)
    rounded = own(x, attention_mask=None, position_embeddings=rotary(x, positions))
    layer = DecoderLayer(own, is_last=False)
    assert pack_linears(layer) == 4  # queries, keys and values at once; the gate was packed with its SiLU
    assert_as_good(layer(x, None, Turns(rotary)(x, positions)), rounded, wanted)


@pytest.mark.parametrize("dtype", [EXACT, ROUNDED])
def test_a_tower_keeps_pictures_and_windows_apart(dtype: torch.dtype) -> None:
    """Two pictures of different size at once, whose windows are of three sizes."""
    config = Qwen2_5_VLVisionConfig(
        depth=3,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        out_hidden_size=48,
        fullatt_block_indexes=[1],
        window_size=56,
        attn_implementation="sdpa",
    )
    tower: Any = shaken(Qwen2_5_VisionTransformerPretrainedModel(config))
    grids = torch.tensor([[1, 10, 14], [1, 6, 4]])
    patches = torch.randn(10 * 14 + 6 * 4, 3 * 2 * 14 * 14).to(dtype)
    wanted = tower(patches.float(), grid_thw=grids).pooler_output
    tower.to(dtype)
    own = tower(patches, grid_thw=grids).pooler_output
    fuse_vision(tower)
    pack_linears(tower)
    found = tower(patches, grid_thw=grids).pooler_output
    if dtype is EXACT:
        assert error(found, wanted) < 1e-5
    assert_as_good(found, own, wanted)


@pytest.mark.parametrize("dtype", [EXACT, ROUNDED])
def test_a_norm_leaves_what_it_is_given_alone(dtype: torch.dtype) -> None:
    own = nn.RMSNorm(64, eps=1e-6)
    own.weight.copy_(torch.randn(64))
    own.variance_epsilon = 1e-6  # as transformers' have it
    x = torch.randn(5, 64).to(dtype)
    before = x.clone()
    found = RMSNorm(own.to(dtype))(x)
    assert torch.equal(x, before)
    assert error(found, own.float()(x.float())) < (1e-6 if dtype is EXACT else 4e-3)


def test_another_activation_than_silu_is_kept() -> None:
    layer = Qwen2DecoderLayer(text_config(hidden_act="gelu"), 0)
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    assert error(GatedMLP(layer.mlp)(x, residual), residual + layer.mlp(x)) < 1e-6


def test_turning_side_by_side_is_turning_in_halves() -> None:
    x, angles = torch.randn(7, 3, HEAD), torch.randn(7, HEAD // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    halves = torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
    wanted = x * cos + halves * sin
    rows = x.flatten(1).T  # what a projection's rows would have made
    paired = pairs_side_by_side(rows, HEAD).T.reshape(x.shape)
    found = turn(paired, turns)
    again = pairs_side_by_side(wanted.flatten(1).T, HEAD).T.reshape(x.shape)
    assert error(found, again) < 1e-6


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_residual_is_added(is_packed: bool) -> None:
    linear = nn.Linear(32, 48).to(ROUNDED)
    x, residual = torch.randn(1, 5, 32).to(ROUNDED), torch.randn(1, 5, 48).to(ROUNDED)
    wanted = residual.float() + linear.float()(x.float())
    linear.to(ROUNDED)
    module = PackedLinear(linear) if is_packed else linear
    assert error(add_linear(residual, module, x), wanted) < 6e-3
