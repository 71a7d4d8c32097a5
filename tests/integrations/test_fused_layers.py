"""Projections that are several in one: each part has a scale of its own."""

import pytest
import torch
from torch import nn

from octavo.integrations.apply import quantize_
from octavo.integrations.fused_layers import part_sizes, shards_of
from octavo.integrations.linear import plan_linear
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings

PER_TENSOR = {"weight": "tensor"}
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("name", "out", "config", "sizes"),
    [
        ("layers.0.mlp.gate_up_proj", 64, {}, (32, 32)),
        ("feed_forward.w13", 64, {}, (32, 32)),
        ("blocks.0.attn.to_qkv", 96, {}, (32, 32, 32)),
        ("attn.to_added_kv", 64, {}, (32, 32)),
        ("self_attn.qkv_proj", 128, GQA, (64, 32, 32)),
        ("self_attn.qkv_proj", 128, {}, None),
        ("self_attn.qkv_proj", 130, GQA, None),
        ("attn.to_qkv", 97, {}, None),
        ("attn.to_q", 96, {}, None),
    ],
)
def test_parts_by_name(name, out, config, sizes):
    assert part_sizes(name, out, config) == sizes


def test_a_small_part_keeps_its_precision():
    """Values of the third part are 2⁻²⁰ of the others': by their scale they would be zero."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"to_qkv": nn.Linear(64, 96, bias=False), "other": nn.Linear(64, 96)})
    with torch.no_grad():
        model["to_qkv"].weight[64:] *= 2.0**-20
    weight = model["to_qkv"].weight.detach().clone()
    quantize_(model, PER_TENSOR)
    fused, other = model["to_qkv"], model["other"]
    assert fused.shards == (32, 32, 32) and fused.state_dict()["weight_scale"].shape == (3,)
    assert other.shards == (96,) and other.state_dict()["weight_scale"].shape == ()
    assert relative_rms(fused.dequantize()[64:], weight[64:]) < 0.04
    whole = Fp8Linear.from_linear(_linear(weight), LinearSettings(**PER_TENSOR))
    assert relative_rms(whole.dequantize()[64:], weight[64:]) > 0.5


def _linear(weight):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight)
    return made


@pytest.mark.parametrize("weight", ["channel", "block 128x128"])
def test_other_granularities_have_no_shards(weight):
    layer = nn.Linear(64, 96)
    assert shards_of(nn.Module(), "to_qkv", layer, LinearSettings(weight=weight)) is None


def test_phi_is_saved_and_loaded_to_the_bit(tmp_path):
    transformers = pytest.importorskip("transformers")
    from octavo import OctavoConfig

    config = transformers.Phi3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        pad_token_id=0,
        **GQA,
    )
    model = transformers.Phi3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "plain")
    quantize_(model, PER_TENSOR)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert attention.qkv_proj.shards == (64, 32, 32) and mlp.gate_up_proj.shards == (96, 96)
    model.save_pretrained(tmp_path / "fp8")
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert torch.equal(load(tmp_path / "fp8")(ids).logits, expected)
    streamed = load(tmp_path / "plain", quantization_config=OctavoConfig(PER_TENSOR))
    assert streamed.model.layers[0].self_attn.qkv_proj.shards == (64, 32, 32)
    assert torch.equal(streamed(ids).logits, expected)


def test_flux_with_fused_projections(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    from octavo.integrations.diffusers import full_size
    from octavo.integrations.diffusers.sensitivity import quantized

    size = full_size.find_full_size("tiny-flux")
    model = full_size.make_transformer(size, torch.device("cpu"))
    model.fuse_qkv_projections()
    name, settings = "transformer_blocks.0.attn.to_qkv", LinearSettings(**PER_TENSOR)
    with quantized(model, plan_linear(model), [name], settings):  # as a scan tries it
        assert model.get_submodule(name).shards == (64, 64, 64)
    quantize_(model, PER_TENSOR)
    assert model.transformer_blocks[0].attn.to_qkv.shards == (64, 64, 64)
    assert issubclass(type(model), diffusers.FluxTransformer2DModel)
