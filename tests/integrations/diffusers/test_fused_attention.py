"""Norms and rotary embedding in the pass that quantizes: as the stock processors do them."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.hooks._helpers import AttentionProcessorRegistry
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    dispatch_attention_fn,
)
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from octavo import Recipe, UnsupportedError, apply_, restore_
from octavo.integrations.diffusers.attention import (
    find_fused,
    find_layers,
    observe_attention,
)
from octavo.integrations.diffusers.processors import (
    PROCESSORS,
    FusedFlux,
    FusedQwenImage,
    take_left,
)
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fused_models import (
    CPU,
    FLIPPED,
    cast,
    make,
    quantized_calls,
    run,
    scales_of,
    stock_path,
)

pytestmark = pytest.mark.usefixtures("without_gradients")

FAMILIES = ["flux", "flux2", "qwen", "z_image"]
# Errors of FP8 are about the same in both; which values they fall on is chance.
MAX_ERROR_OVER_STOCK = 1.1
NUM_TEXT = 16


def recipe_of(scaling, model, inputs):
    if scaling == "dynamic":
        return Recipe(attention="fp8")
    scales = scales_of(model, inputs)
    return Recipe(attention={"scaling": "static"}, scales=scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_are_those_of_the_stock_processor(family):
    model, inputs = make(family)
    changes = apply_(model, Recipe(attention="fp8"))
    names = list(find_layers(model))
    assert changes.fused["attention"] == changes.layers["attention"] == names
    assert f"{len(names)} layers, {len(names)} of them fused" in str(changes)
    with quantized_calls() as calls:
        result = run(model, inputs)
    with quantized_calls() as stock_calls, stock_path():
        stock = run(model, inputs)
    assert len(calls) == len(stock_calls) == len(names)
    assert all(norm is not None and rotary is not None for *_, norm, rotary in calls)
    assert all(norm is None and rotary is None for *_, norm, rotary in stock_calls)
    for call, stock_call in zip(calls, stock_calls, strict=True):
        for x, expected in zip(call[:3], stock_call[:3], strict=True):
            assert relative_rms(x, expected) < FLIPPED
    first = zip(calls[0][:3], stock_calls[0][:3], strict=True)
    assert max(relative_rms(x, expected) for x, expected in first) < 1e-6
    assert relative_rms(result, stock) < FLIPPED


@pytest.mark.parametrize("scaling", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_results_are_no_worse_than_those_of_the_stock_path(family, scaling):
    """Both against the model in float32; ours rounds queries and keys less often."""
    model, inputs = make(family, torch.bfloat16)
    truth = run(copy.deepcopy(model).float(), cast(inputs, torch.float32, CPU))
    apply_(model, recipe_of(scaling, model, inputs))
    error = relative_rms(run(model, inputs), truth)
    with stock_path():
        stock_error = relative_rms(run(model, inputs), truth)
    assert 0 < error <= MAX_ERROR_OVER_STOCK * stock_error < 0.1


def test_streams_have_their_own_norms():
    model, inputs = make("flux")
    apply_(model, Recipe(attention="fp8"))
    with quantized_calls() as calls:
        run(model, inputs)
    norms = [call[3] for call in calls]
    assert [(len(norm.q), norm.num_first) for norm in norms] == [(2, NUM_TEXT)] * 2 + [(1, 0)] * 2
    layer = model.transformer_blocks[1].attn
    expected = torch.stack([layer.norm_added_k.weight, layer.norm_k.weight])
    assert torch.equal(norms[1].k, expected)
    assert norms[1].eps == layer.norm_q.eps


def test_padding_of_a_text_is_never_seen():
    model, inputs = make("qwen")
    mask = torch.ones(2, NUM_TEXT, dtype=torch.bool)
    mask[0, 5:] = False
    inputs["encoder_hidden_states_mask"] = mask
    full = {**inputs, "encoder_hidden_states_mask": None}
    apply_(model, recipe_of("static", model, inputs))
    with quantized_calls() as calls:
        result = run(model, inputs)
    assert all(call[3] is not None for call in calls)
    changed = inputs["encoder_hidden_states"].clone()
    changed[0, 5:] = -changed[0, 5:]
    assert_same_bits(run(model, {**inputs, "encoder_hidden_states": changed}), result)
    assert not torch.equal(run(model, full)[0], result[0])
    with stock_path():
        assert relative_rms(result, run(model, inputs)) < FLIPPED


def test_masks_that_the_stock_processor_refuses():
    model, inputs = make("qwen")
    apply_(model, Recipe(attention="fp8"))
    layer = model.transformer_blocks[0].attn
    x, text = torch.randn(2, 9, 64), torch.randn(2, 5, 64)
    with pytest.raises(ValueError, match="does not accept an external attention_mask"):
        layer(x, encoder_hidden_states=text, attention_mask=torch.ones(2, 14).bool())
    assert take_left() is None
    flux, _ = make("flux")
    apply_(flux, Recipe(attention="fp8"))
    layer = flux.single_transformer_blocks[0].attn
    with pytest.raises(UnsupportedError, match="got another pattern"):
        layer(x, attention_mask=torch.ones(9, 9, dtype=torch.bool).tril())
    assert take_left() is None


def test_no_rotary_embedding():
    model, _ = make("flux")
    apply_(model, Recipe(attention="fp8"))
    layer, x = model.single_transformer_blocks[0].attn, torch.randn(2, 9, 64)
    with quantized_calls() as calls:
        result = layer(x)
    with stock_path():
        assert relative_rms(result, layer(x)) < FLIPPED
    assert calls[0][3] is not None and calls[0][4] is None


def test_restored_processors_are_those_that_were_there():
    model, inputs = make("flux")
    plain, state = run(model, inputs), set(model.state_dict())
    model.transformer_blocks[1].attn.processor = model.transformer_blocks[0].attn.processor
    before = {name: layer.processor for name, layer in find_layers(model).items()}
    apply_(model, Recipe(attention="fp8", skip_layers=["single_transformer_blocks.0.attn"]))
    kinds = [type(layer.processor) for layer in find_layers(model).values()]
    assert kinds == [FusedFlux, FusedFlux, FluxAttnProcessor, FusedFlux]
    assert set(model.state_dict()) == state
    copied = copy.deepcopy(model)
    fp8 = run(model, inputs)
    assert_same_bits(run(copied, inputs), fp8)
    for changed in (model, copied):
        assert len(restore_(changed).layers["attention"]) == 3
        assert_same_bits(run(changed, inputs), plain)
    for name, layer in find_layers(model).items():
        assert layer.processor is before[name] and type(layer.processor) is FluxAttnProcessor
        assert not [key for key in vars(layer.processor) if "octavo" in key]
    assert not torch.equal(fp8, plain)


def test_other_backends_take_the_stock_path():
    model, inputs = make("qwen")
    plain = run(model, inputs)
    apply_(model, Recipe(attention="fp8"))
    for layer in find_layers(model).values():
        layer.processor._attention_backend = AttentionBackendName.NATIVE
    assert_same_bits(run(model, inputs), plain)


@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_observers_see_queries_and_keys_that_are_normalized_and_turned(family):
    model, inputs = make(family)
    seen = {}

    def observe(key):
        def see(name, *qkv):
            seen[key, name] = qkv

        with observe_attention(find_layers(model), see):
            run(model, inputs)

    observe("plain")
    apply_(model, Recipe(attention="fp8"))
    observe("fp8")
    names = list(find_layers(model))
    for name in names:
        for x, expected in zip(seen["fp8", name], seen["plain", name], strict=True):
            # The first layer has seen no FP8 yet.
            assert relative_rms(x, expected) <= (0 if name == names[0] else 0.1)
    assert {type(layer.processor) for layer in find_layers(model).values()} <= {
        FusedFlux,
        FusedQwenImage,
    }


class Adapted(nn.Module):
    """A projection with something added, as LoRA has it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.seen = base, []

    def forward(self, x):
        self.seen.append(x)
        return self.base(x) + x.flip(-1)


def test_projections_are_the_layers_own():
    model, inputs = make("flux")
    apply_(model, Recipe(attention="fp8"))
    plain, layer, order = run(model, inputs), model.transformer_blocks[0].attn, []
    layer.to_q = Adapted(layer.to_q)
    for name in ("to_q", "to_k", "to_v"):
        getattr(layer, name).register_forward_pre_hook(
            lambda _, args, n=name: order.append((n, args[0]))
        )
    result = run(model, inputs)
    assert len(layer.to_q.seen) == 1 and relative_rms(result, plain) > 1e-3
    # A joint product of several layers is made by the first, of that very tensor.
    assert [name for name, _ in order] == ["to_q", "to_k", "to_v"]
    assert order[0][1] is order[1][1] is order[2][1]
    with stock_path():
        assert relative_rms(result, run(model, inputs)) < FLIPPED


def test_joint_projections_of_diffusers():
    model, inputs = make("flux")
    apply_(model, Recipe(attention="fp8"))
    expected = run(model, inputs)
    for layer in find_layers(model).values():
        layer.fuse_projections()
    with quantized_calls() as calls:
        assert relative_rms(run(model, inputs), expected) < FLIPPED
    assert all(call[3] is not None for call in calls)


def test_hooks_of_diffusers_know_our_classes():
    apply_(make("flux")[0], Recipe(attention="fp8"))
    known = AttentionProcessorRegistry.get(FluxAttnProcessor)
    assert AttentionProcessorRegistry.get(FusedFlux) is known
    assert all(issubclass(own, stock) for stock, own in PROCESSORS.items())


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_one_graph_for_all_blocks_of_a_kind(family, scaling):
    from torch._dynamo.testing import CompileCounterWithBackend

    def count(model):
        counter = CompileCounterWithBackend("aot_eager")
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
        return counter

    model, inputs = make(family, torch.bfloat16)
    plain = copy.deepcopy(model)
    counter = count(plain)
    run(plain, inputs)
    expected = counter.frame_count
    apply_(model, recipe_of(scaling, model, inputs))
    eager = run(model, inputs)
    torch._dynamo.reset()
    counter = count(model)
    assert_same_bits(run(model, inputs), eager)
    assert counter.frame_count == expected


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # of the compiler, about complex numbers and others
@pytest.mark.parametrize("scaling", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_on_a_gpu(family, scaling):
    """Heads of 128 through the kernels, by block and compiled, against the model in float32."""
    sizes = {"attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    model, inputs = make(family, torch.bfloat16, torch.device("cuda"), **sizes)
    truth = run(copy.deepcopy(model).float(), cast(inputs, torch.float32, "cuda"))
    apply_(model, recipe_of(scaling, model, inputs))
    with quantized_calls() as calls:
        found = run(model, inputs)
    assert all(norm is not None and rotary is not None for *_, norm, rotary in calls)
    error = relative_rms(found, truth)
    with stock_path():
        stock = run(model, inputs)
    stock_error = relative_rms(stock, truth)
    assert 0 < error <= MAX_ERROR_OVER_STOCK * stock_error < 0.1
    model.compile_repeated_blocks(fullgraph=True)
    compiled_error = relative_rms(run(model, inputs), truth)
    assert 0 < compiled_error <= MAX_ERROR_OVER_STOCK * stock_error


def test_processors_that_diffusers_makes_later_run_as_stock_ones():
    """As loading and unloading an IP-Adapter does: new objects of the class of the old ones."""
    model, inputs = make("flux")
    stock = {name: type(layer.processor) for name, layer in find_layers(model).items()}
    before = run(model, inputs)
    apply_(model, Recipe(attention="fp8"))
    layers = find_layers(model)
    for layer in list(layers.values())[1:]:
        layer.processor = type(layer.processor)()
    assert find_fused(model) == list(layers)[:1]
    with quantized_calls() as calls:
        run(model, inputs)
    assert len(calls) == 1
    restore_(model)
    assert {name: type(layer.processor) for name, layer in layers.items()} == stock
    assert_same_bits(run(model, inputs), before)
    apply_(model, Recipe(attention="fp8"))
    assert find_fused(model) == list(layers)


@pytest.mark.parametrize("where", ["to_out.0", "to_k"])
def test_norms_are_for_the_one_call_of_their_layer(where):
    """Calls of the backend before it and after it, by hooks, have none."""
    model, inputs = make("flux")
    apply_(model, Recipe(attention="fp8"))
    layer = model.transformer_blocks[0].attn
    q = torch.randn(2, NUM_TEXT + inputs["hidden_states"].shape[1], 2, layer.head_dim)

    def attend():
        return dispatch_attention_fn(q, q, q, backend=layer.processor._attention_backend)

    before, expected, seen = run(model, inputs), attend(), []
    layer.get_submodule(where).register_forward_hook(lambda *_: seen.append(attend()))
    assert_same_bits(run(model, inputs), before)
    assert_same_bits(seen[0], expected)


def test_a_model_inside_another_leaves_its_norms_alone():
    (outer, inputs), (inner, _) = make("flux"), make("flux")
    for model in (outer, inner):
        apply_(model, Recipe(attention="fp8"))
    expected = run(outer, inputs)

    def run_inner(*_):
        run(inner, inputs)

    outer.transformer_blocks[0].attn.to_k.register_forward_hook(run_inner)
    assert_same_bits(run(outer, inputs), expected)
