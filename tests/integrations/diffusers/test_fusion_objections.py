"""What cannot leave norms and rotary embedding to the pass that quantizes takes the stock path."""

import re
from functools import wraps

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from octavo import Recipe, apply_
from octavo.integrations.diffusers.attention import find_layers
from octavo.integrations.diffusers.processors import HEAD_DIMS, fusion_objection
from octavo.kernels.quantize_qkv.config import NORM_HEAD_DIMS
from octavo.numerics.error import relative_rms
from octavo_testkit.models.fused_models import (
    CPU,
    FLIPPED,
    make,
    quantized_calls,
    run,
    stock_path,
)

pytestmark = pytest.mark.usefixtures("without_gradients")


def set_norm(name, norm):
    return lambda layer: setattr(layer, name, norm)


def hook_norm(layer):
    layer.norm_k.register_forward_hook(lambda *args: None)


def replace_forward(layer):
    layer.norm_k.forward = layer.norm_k.forward


OBJECTIONS = {
    "kind": (set_norm("norm_k", nn.LayerNorm(32)), "expected RMS norms .* got LayerNorm"),
    "none": (set_norm("norm_added_q", nn.Identity()), "expected RMS norms .* got Identity"),
    "weight": (set_norm("norm_q", nn.RMSNorm(32, 1e-6, False)), "with a weight and no bias"),
    "bias": (set_norm("norm_q", RMSNorm(32, 1e-6, bias=True)), "with a weight and no bias"),
    "zero eps": (set_norm("norm_q", nn.RMSNorm(32, eps=0.0)), "one eps above 0"),
    "eps": (set_norm("norm_added_k", nn.RMSNorm(32, eps=1e-3)), "norms with one eps"),
    "no eps": (set_norm("norm_q", nn.RMSNorm(32)), "norms with one eps"),
    "hook": (hook_norm, "norms without hooks"),
    "forward": (replace_forward, "with a forward of their class"),
    "dtype": (lambda layer: layer.norm_k.bfloat16(), "weights of one shape and dtype"),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("case", OBJECTIONS)
def test_layers_that_cannot_be_fused_take_the_stock_path(case):
    change, message = OBJECTIONS[case]
    model, inputs = make("flux")
    first = model.transformer_blocks[0].attn
    assert fusion_objection(first, CPU) is None
    change(first)
    assert re.search(message, fusion_objection(first, CPU))
    changes = apply_(model, Recipe(attention="fp8"))
    assert changes.fused["attention"] == changes.layers["attention"][1:]
    with quantized_calls() as calls:
        result = run(model, inputs)
    assert [call[3] is None for call in calls] == [True, False, False, False]
    with stock_path():
        assert relative_rms(result, run(model, inputs)) < FLIPPED


def test_processors_of_other_classes_are_named():
    layer = make("flux")[0].transformer_blocks[0].attn
    layer.processor = type("Other", (FluxAttnProcessor,), {})()
    assert fusion_objection(layer, CPU).endswith("Qwen-Image or Z-Image, got Other")


def test_a_text_without_norms_takes_the_stock_path():
    model, inputs = make("qwen")
    first = model.transformer_blocks[0].attn
    first.norm_added_q = first.norm_added_k = None
    apply_(model, Recipe(attention="fp8"))
    with quantized_calls() as calls:
        result = run(model, inputs)
    assert [call[3] is None for call in calls] == [True, False]
    with stock_path():
        assert relative_rms(result, run(model, inputs)) < FLIPPED


def test_the_kernel_has_some_head_dims():
    layer = make("flux")[0].to("meta").transformer_blocks[0].attn
    assert HEAD_DIMS == NORM_HEAD_DIMS  # integrations do not import kernels
    cuda = torch.device("cuda")

    def objection(head_dim):
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            norm = nn.RMSNorm(head_dim, eps=1e-6, device="meta")
            setattr(layer, name, norm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Parameter, "device", cuda, raising=False)
            return fusion_objection(layer, cuda)

    assert [objection(head_dim) for head_dim in (32, 64, 128)] == [None] * 3
    assert objection(80) == "expected head_dim of 32, 64, 128 on a GPU, got 80"
    assert "on cuda" in fusion_objection(layer, cuda)


@pytest.mark.parametrize("family", ["flux", "qwen", "z_image"])
def test_tables_of_another_form_take_the_stock_path(family, monkeypatch):
    model, inputs = make(family)
    apply_(model, Recipe(attention="fp8"))
    expected = run(model, inputs)
    kind = type(next(iter(find_layers(model).values())).processor)
    call, name = kind.__call__, "freqs_cis" if family == "z_image" else "image_rotary_emb"

    @wraps(call)  # diffusers looks at the arguments that it has
    def with_others(processor, *args, **options):
        if name in options:
            options[name] = others(options[name])
        else:
            args = (*args[:-1], others(args[-1]))
        return call(processor, *args, **options)

    def others(tables):
        if isinstance(tables, torch.Tensor):
            return tables.to(torch.complex128)
        wide = torch.complex128 if tables[0].is_complex() else torch.float64
        return tuple(x.to(wide) for x in tables)

    monkeypatch.setattr(kind, "__call__", with_others)
    with quantized_calls() as calls:
        result = run(model, inputs)
    assert all(call[3] is None for call in calls)
    assert relative_rms(result, expected) < FLIPPED
