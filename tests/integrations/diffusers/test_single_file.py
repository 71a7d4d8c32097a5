"""One file with FP8 weights, by diffusers' names and by those of a model's authors."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from safetensors.torch import save_file

from octavo import CheckpointError, load_fp8
from octavo.integrations.diffusers.single_file import pack_rows, unpack_rows
from octavo.layers.linear import Fp8Linear
from octavo.numerics.granularity import PerChannel, PerTensor
from octavo.numerics.quantize import quantize
from octavo.testing.asserts import assert_same_bits

E4M3 = torch.tensor([*json.dumps({"format": "float8_e4m3fn"}).encode()], dtype=torch.uint8)
LAYER = "transformer_blocks.0.attn.to_k"


@pytest.fixture(autouse=True)
def no_gradients(without_gradients):
    pass


@pytest.fixture
def folder(folder_of):
    return folder_of("flux") / "transformer"


def in_fp8(tensors, layers, granularity=PerTensor(), scale="scale_weight", **companions):
    """Tensors with FP8 layers as ComfyUI writes them, and what the weights stand for, by layer."""
    found, twins = dict(tensors), {}
    for layer in layers:
        quantized = quantize(found[f"{layer}.weight"], granularity)
        found[f"{layer}.weight"] = quantized.data
        found[f"{layer}.{scale}"] = quantized.scale
        found |= {f"{layer}.{name}": x.clone() for name, x in companions.items()}
        twins[layer] = quantized.dequantize()
    return found, twins


def linear_layers(model):
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "block" in n]


def assert_is_fp8(model, twins):
    layers = {n: part for n, part in model.named_modules() if isinstance(part, Fp8Linear)}
    assert layers.keys() == twins.keys()
    for name, layer in layers.items():
        assert_same_bits(layer.dequantize(), twins[name])


@pytest.mark.parametrize("num_scales", [1, 2])
def test_rows_keep_their_scales(num_scales):
    weight = torch.randn(5, 3).to(torch.float8_e4m3fn)
    scales = [torch.rand(5), torch.tensor(0.25)][:num_scales]
    first, second = pack_rows(weight, *scales).split((2, 3))
    for part, rows in ((first, slice(2)), (second, slice(2, 5))):
        found, found_scales = unpack_rows(part, num_scales)
        assert_same_bits(found, weight[rows])
        for actual, expected in zip(found_scales, scales, strict=True):
            assert_same_bits(actual, expected.expand(5)[rows].contiguous())


@pytest.mark.parametrize(
    ("granularity", "options"),
    [
        (PerTensor(), {}),
        (PerTensor(), {"scale": "weight_scale", "comfy_quant": E4M3}),
        (PerTensor(), {"scale_input": torch.tensor(0.02)}),
        (PerChannel(), {"scale": "weight_scale"}),
    ],
    ids=["scaled_fp8", "comfy_quant", "static", "channel"],
)
def test_names_of_diffusers(granularity, options, folder, tmp_path):
    plain = FluxTransformer2DModel.from_pretrained(folder)
    tensors, twins = in_fp8(plain.state_dict(), linear_layers(plain), granularity, **options)
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "file.safetensors")
    model = load_fp8(FluxTransformer2DModel, tmp_path / "file.safetensors", config=str(folder))
    assert_is_fp8(model, twins)
    for name, x in plain.state_dict().items():
        if not any(name.startswith(f"{layer}.weight") for layer in twins):
            assert_same_bits(model.state_dict()[name], x)
    settings = model.get_submodule(LAYER).settings
    assert settings.scaling == ("static" if "scale_input" in options else "dynamic")
    model.save_pretrained(tmp_path / "saved")
    assert_is_fp8(FluxTransformer2DModel.from_pretrained(tmp_path / "saved"), twins)


def test_broken_files_raise(folder, tmp_path):
    plain = FluxTransformer2DModel.from_pretrained(folder)
    tensors, _ = in_fp8(plain.state_dict(), linear_layers(plain))
    path = tmp_path / "file.safetensors"
    nvfp4 = torch.tensor([*b'{"format": "nvfp4"}'], dtype=torch.uint8)
    weight = tensors[f"{LAYER}.weight"].clone()
    for changes, match in (
        ({f"{LAYER}.scale_weight": None}, f"{LAYER}: expected a scale"),
        ({f"{LAYER}.comfy_quant": nvfp4}, "expected the format float8_e4m3fn"),
        ({f"{LAYER}.scale_weight": torch.ones(7)}, r"expected shape \[\] or"),
        ({f"{LAYER}.scale_weight": torch.tensor(-1.0)}, "expected positive finite scales"),
        ({f"{LAYER}.scale_input": torch.tensor(1.0)}, "expected one scheme for all layers"),
        ({"x_embedder.weight": None}, "expected the tensors of FluxTransformer2DModel, by"),
        (
            {"an_extra.weight": torch.ones(2)},
            "expected .* names .*got 'an_extra.weight'.*IndexError",
        ),
        ({"extra.weight": weight}, "extra: expected a scale"),
    ):
        changed = {**tensors, **changes}
        save_file({name: x for name, x in changed.items() if x is not None}, path)
        with pytest.raises(CheckpointError, match=match):
            load_fp8(FluxTransformer2DModel, path, config=str(folder))


def fused(tensors, name, parts):
    """Take parts of a layer out of tensors, and put one layer in their place."""
    for leaf in ("weight", "bias"):
        if f"{parts[0]}.{leaf}" in tensors:
            tensors[f"{name}.{leaf}"] = torch.cat([tensors.pop(f"{p}.{leaf}") for p in parts])


def split(twins, name, parts, tensors):
    """What the parts of a fused layer stand for."""
    sizes = [len(tensors[f"{part}.weight"]) for part in parts]
    return dict(zip(parts, twins.pop(name).split(sizes), strict=True))


def test_fused_layers_of_z_image(folder_of, tmp_path):
    folder = folder_of("z_image") / "transformer"
    plain = ZImageTransformer2DModel.from_pretrained(folder)
    tensors = {name: x.clone() for name, x in plain.state_dict().items()}
    blocks = [name.removesuffix(".to_q.weight") for name in tensors if name.endswith("to_q.weight")]
    for block in blocks:
        fused(tensors, f"{block}.qkv", [f"{block}.to_{part}" for part in "qkv"])
    tensors = {
        name.replace("all_final_layer.2-1.", "final_layer.")
        .replace("all_x_embedder.2-1.", "x_embedder.")
        .replace(".attention.to_out.0.", ".attention.out.")
        .replace(".attention.norm_", ".attention.")
        .replace(".attention.q.weight", ".attention.q_norm.weight")
        .replace(".attention.k.weight", ".attention.k_norm.weight"): x
        for name, x in tensors.items()
    }
    tensors, twins = in_fp8(tensors, [f"{block}.qkv" for block in blocks])
    for block in blocks:
        parts = [f"{block}.to_{part}" for part in "qkv"]
        twins |= split(twins, f"{block}.qkv", parts, plain.state_dict())
    # Another component of the file is not the transformer's.
    tensors = {f"model.diffusion_model.{name}": x for name, x in tensors.items()}
    tensors["vae.decoder.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "z_image.safetensors")
    path = tmp_path / "z_image.safetensors"
    model = load_fp8(ZImageTransformer2DModel, path, config=str(folder))
    assert_is_fp8(model, twins)
    for name, x in plain.state_dict().items():
        if name.rpartition(".")[0] not in twins:
            assert_same_bits(model.state_dict()[name], x)


# FLUX.1's own names in place of diffusers', outside of blocks and inside of both kinds.
_AROUND = {
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "txt_in": "context_embedder",
    "img_in": "x_embedder",
    "final_layer.linear": "proj_out",
}
_DOUBLE = {
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
}
_SINGLE = {
    "modulation.lin": "norm.linear",
    "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "linear2": "proj_out",
}
_NORMS = {
    "double_blocks.0.img_attn.norm.query_norm": "transformer_blocks.0.attn.norm_q",
    "double_blocks.0.img_attn.norm.key_norm": "transformer_blocks.0.attn.norm_k",
    "double_blocks.0.txt_attn.norm.query_norm": "transformer_blocks.0.attn.norm_added_q",
    "double_blocks.0.txt_attn.norm.key_norm": "transformer_blocks.0.attn.norm_added_k",
    "single_blocks.0.norm.query_norm": "single_transformer_blocks.0.attn.norm_q",
    "single_blocks.0.norm.key_norm": "single_transformer_blocks.0.attn.norm_k",
}


def flux_names():
    """FLUX.1's layers -> what diffusers makes of them: one block of each kind."""
    names = {name: [part] for name, part in _AROUND.items()}
    for own, theirs, layers in (
        ("double_blocks.0", "transformer_blocks.0", _DOUBLE),
        ("single_blocks.0", "single_transformer_blocks.0", _SINGLE),
    ):
        for name, parts in layers.items():
            names[f"{own}.{name}"] = [f"{theirs}.{part}" for part in parts.split()]
    return names


@pytest.mark.slow  # diffusers' conversion takes FLUX.1's real width only: 0.5 billion weights
def test_names_of_flux(tmp_path):
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    finally:
        torch.set_default_dtype(torch.float32)
    plain.save_config(tmp_path / "config")
    tensors = dict(plain.state_dict())
    for own, theirs in _NORMS.items():
        tensors[f"{own}.scale"] = tensors.pop(f"{theirs}.weight")
    for leaf in ("weight", "bias"):
        scale, shift = tensors.pop(f"norm_out.linear.{leaf}").chunk(2)
        tensors[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
    names = flux_names()
    for own, parts in names.items():
        fused(tensors, own, parts)
    assert not [name for name in tensors if name.startswith(("transformer_", "single_trans"))]
    inside = [name for name in names if "blocks" in name]
    tensors, twins = in_fp8(tensors, inside)
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "flux1-dev-fp8.safetensors")
    before = plain.state_dict()
    for own in inside:
        twins |= split(twins, own, names[own], before)
    del tensors
    path, options = tmp_path / "flux1-dev-fp8.safetensors", {"dtype": torch.bfloat16}
    model = load_fp8(FluxTransformer2DModel, path, config=str(tmp_path / "config"), **options)
    assert_is_fp8(model, twins)
    after = model.state_dict()
    for name, x in before.items():
        if name.rpartition(".")[0] not in twins:
            assert_same_bits(after[name], x)
