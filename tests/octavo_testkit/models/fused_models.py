"""Transformers with FP8 attention as tests run them: tiny, with norms that all differ."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from octavo import ops
from octavo.calibration.scale_file import LayerScales, ScaleSet
from octavo.integrations.diffusers import full_size, processors
from octavo.integrations.diffusers.attention import find_layers, observe_attention
from octavo.reference.qkv import normalize, rotate
from octavo_testkit.models.tiny_flux import make_flux2_transformer
from octavo_testkit.models.tiny_pipelines import make_z_image_transformer

CPU = torch.device("cpu")
# Single values of FP8 that round to the other side, where float32 sums have another order.
FLIPPED = 2e-3


def make(family, dtype=torch.float32, device=CPU, **changes):
    """A transformer whose norms all differ, and inputs of a batch of two."""
    torch.manual_seed(0)
    if family in ("flux", "qwen"):
        size = full_size.find_full_size(f"tiny-{family}")
        kind = getattr(full_size.diffusers, size.kind)
        model = kind(**{**size.config, **dict.fromkeys(size.layers, 2), **changes})
        inputs = full_size.make_inputs(size, CPU)
        for name in ("hidden_states", "encoder_hidden_states", "pooled_projections"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], inputs[name].flip(1)])
        for name in ("timestep", "guidance"):
            if name in inputs:
                inputs[name] = inputs[name].repeat(2)
        if family == "qwen":
            inputs["img_shapes"] = inputs["img_shapes"] * 2
    elif family == "flux2":
        model, inputs = make_flux2_transformer(), draw_flux2()
    else:
        model, inputs = make_z_image_transformer(1), draw_z_image()
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:
            nn.init.uniform_(weight, 0.5, 2.0)
    return model.to(device, dtype).eval(), cast(inputs, dtype, device)


def draw_flux2():
    return {
        "hidden_states": torch.randn(2, 9, 16),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "timestep": torch.full((2,), 0.5),
        "img_ids": torch.randint(9, (9, 4)).float(),
        "txt_ids": torch.randint(9, (5, 4)).float(),
        "return_dict": False,
    }


def draw_z_image():
    texts = [torch.randn(40, 32), torch.randn(7, 32)]  # padded, and at positions of their own
    images = [torch.randn(16, 1, 8, 8), torch.randn(16, 1, 8, 8)]
    return {"x": images, "t": torch.full((2,), 0.5), "cap_feats": texts, "return_dict": False}


def cast(tree, dtype, device):
    if isinstance(tree, dict):
        return {name: cast(x, dtype, device) for name, x in tree.items()}
    if isinstance(tree, list):
        return [cast(x, dtype, device) for x in tree]
    if not isinstance(tree, torch.Tensor):
        return tree
    return tree.to(device, dtype if tree.is_floating_point() else None)


def run(model, inputs):
    result = model(**inputs)[0]
    return torch.stack(result) if isinstance(result, list) else result


def scales_of(model, inputs):
    """Static scales with some room, as a recipe takes them."""
    found = {}

    def see(name, *qkv):
        found[name] = LayerScales(*(1.5 * float(x.abs().max()) / 448 for x in qkv))

    with observe_attention(find_layers(model), see):
        run(model, inputs)
    return ScaleSet(found).to_dict()


@contextmanager
def stock_path():
    """All layers normalize and turn by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "_prepare", lambda *args: None)
        yield


@contextmanager
def quantized_calls():
    """What `quantize_qkv` is given: q and k as they are quantized, v, and norm and rotary."""
    calls, quantize = [], ops.quantize_qkv

    def note(q, k, v, *args, norm=None, rotary=None, first=None, **options):
        parts, whole = [], (q, k, v)
        if first is not None:
            whole = [torch.cat(both, dim=1) for both in zip(first, whole, strict=True)]
        for x, side in zip(whole[:2], "qk", strict=True):
            if norm is not None:
                x = normalize(x, getattr(norm, side), norm.eps, norm.num_first)
            parts.append(x if rotary is None else rotate(x, rotary))
        calls.append((*parts, whole[2], norm, rotary))
        return quantize(q, k, v, *args, norm=norm, rotary=rotary, first=first, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "quantize_qkv", note)
        yield calls
