"""Layers that stay in 16 bits compute in their faster forms what they did before."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import nn

from octavo import Recipe, apply_
from octavo.integrations.diffusers import linear
from octavo.integrations.diffusers.linear import (
    FusedGelu,
    TwoPassLayerNorm,
    two_pass_layer_norm,
    use_faster_forms_,
)
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo_testkit.models.tiny_flux import make_transformer
from octavo_testkit.models.tiny_pipelines import load_pipeline, run_pipeline


@pytest.fixture
def calls(monkeypatch):
    """The shapes of what went by `ops.linear_gelu`; the forms are used on a CPU, too."""
    seen = []

    def counted(x, weight, bias):
        seen.append(tuple(x.shape))
        return linear_gelu(x, weight, bias)

    linear_gelu = linear.ops.linear_gelu
    monkeypatch.setattr(linear.ops, "linear_gelu", counted)
    monkeypatch.setattr(linear, "DEVICES", ("cpu", "cuda"))
    return seen


def make_feed_forward(dtype=torch.bfloat16, device="cpu", **options):
    torch.manual_seed(0)
    options = {"activation_fn": "gelu-approximate", "inner_dim": 96, **options}
    layer = FeedForward(48, 48, **options).to(device, dtype).eval()
    return layer, torch.randn(2, 7, 48, device=device, dtype=dtype)


def of_float32(layer, x):
    return copy.deepcopy(layer).float()(x.float())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_is_part_of_the_product(calls, dtype):
    layer, x = make_feed_forward(dtype)
    truth, before = of_float32(layer, x), layer(x)
    assert use_faster_forms_(layer) == ["net.0"] and type(layer.net[0]) is FusedGelu
    after = layer(x)
    assert calls == [(2, 7, 48)] and after.dtype == dtype
    assert relative_rms(after, truth) <= 1.02 * relative_rms(before, truth) < 0.01


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"activation_fn": "gelu"},  # by erf
        {"activation_fn": "geglu"},
        {"activation_fn": "swiglu"},
        {"bias": False},
        {"inner_dim": 92},  # no multiple of 8
    ],
    ids=str,
)
def test_others_stay(calls, options):
    layer, x = make_feed_forward(**options)
    before = layer(x)
    assert use_faster_forms_(layer) == []
    assert torch.equal(layer(x), before) and calls == []


class Doubled(nn.Linear):
    """Such as an adapter around a layer."""

    def forward(self, input):
        return 2 * super().forward(input)


def hooked(layer):
    layer.net[0].proj.register_forward_hook(lambda module, args, result: 2 * result)


def hooked_before(layer):
    layer.net[0].proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def patched(layer):
    proj = layer.net[0].proj
    proj.forward = lambda x: 2 * nn.functional.linear(x, proj.weight, proj.bias)


def wrapped(layer):
    layer.net[0].proj.__class__ = Doubled


@torch.no_grad()
@pytest.mark.parametrize("change", [hooked, hooked_before, patched, wrapped])
def test_what_comes_later_to_the_linear_layer_is_not_passed_by(calls, change):
    """Adapters, hooks and offloading work on the linear layer as if there was no other form."""
    stock, x = make_feed_forward()
    change(stock)
    layer, _ = make_feed_forward()
    use_faster_forms_(layer)
    change(layer)
    assert torch.equal(layer(x), stock(x)) and calls == []


def test_calls_that_take_the_stock_path(calls):
    layer, x = make_feed_forward(torch.float32)
    use_faster_forms_(layer)
    with torch.no_grad():
        layer(x)  # in float32
    layer = layer.bfloat16()
    layer(x.bfloat16()).sum().backward()  # with gradients
    assert layer.net[0].proj.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert layer(x.bfloat16()).dtype == torch.float16
    assert calls == []
    with torch.no_grad():
        layer(x.bfloat16())
    assert calls == [(2, 7, 48)]


class Wrapped(torch.Tensor):
    """Such as a weight that torchao has quantized."""


def with_wrapped_weight(layer):
    weight = layer.net[0].proj.weight.data.as_subclass(Wrapped)
    layer.net[0].proj.weight = nn.Parameter(weight, False)


def without_bias(layer):
    layer.net[0].proj.bias = None


@torch.no_grad()
@pytest.mark.parametrize("change", [with_wrapped_weight, without_bias])
def test_weights_of_another_kind_take_the_stock_path(calls, change):
    stock, x = make_feed_forward()
    layer, _ = make_feed_forward()
    use_faster_forms_(layer)
    change(stock)
    change(layer)
    assert torch.equal(layer(x), stock(x)) and calls == []


def test_a_bias_may_be_trained_alone(calls):
    layer, x = make_feed_forward()
    use_faster_forms_(layer)
    layer.requires_grad_(False).net[0].proj.bias.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.net[0].proj.bias.grad is not None and calls == []


@torch.no_grad()
def test_a_cpu_runs_what_it_did():
    layer, x = make_feed_forward()
    before = layer(x)
    use_faster_forms_(layer)
    assert torch.equal(layer(x), before)


@torch.no_grad()
def test_names_and_copies():
    layer, x = make_feed_forward()
    keys = list(layer.state_dict())
    use_faster_forms_(layer)
    twin = copy.deepcopy(layer)
    assert use_faster_forms_(layer) == [] and list(layer.state_dict()) == keys
    twin.net[0].proj.weight.zero_()
    assert type(twin.net[0]) is FusedGelu and layer.net[0].proj.weight.any()
    assert isinstance(twin.net[0], GELU)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("size", [1, 63, 64, 3072])
def test_two_passes(size, affine, dtype):
    """Against float64: a rounding of the result, and of float32 sums of squares."""
    torch.manual_seed(0)
    x = (torch.randn(5, size) * torch.tensor([1e-3, 1, 1, 30, 100])[:, None] + 3).to(dtype)
    weight, bias = (torch.randn(size).to(dtype) if affine else None for _ in range(2))
    found = two_pass_layer_norm(x, weight, bias, 1e-5)
    given = [None if each is None else each.double() for each in (weight, bias)]
    truth = nn.functional.layer_norm(x.double(), (size,), *given, eps=1e-5)
    assert found.dtype == dtype
    # What is left of a mean of 3 beside values of a thousandth is off by its rounding.
    atol = 0.01 if dtype == torch.float32 else 0.02
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1:].double(), truth[1:], rtol=eps, atol=eps + 2e-5)
    torch.testing.assert_close(found[:1].double(), truth[:1], rtol=eps, atol=eps + atol)


def test_two_passes_of_what_is_not_finite():
    x = torch.tensor([[1.0, 2.0, torch.nan], [1.0, 2.0, torch.inf], [3.0, 3.0, 3.0]])
    found = two_pass_layer_norm(x, None, None, 1e-5)
    assert found[:2].isnan().all() and not found[2].any()


@torch.no_grad()
@pytest.mark.parametrize("affine", [True, False])
def test_norms_have_two_passes_in_a_compiled_model_alone(calls, affine, monkeypatch):
    norm = nn.LayerNorm(48, elementwise_affine=affine)
    x = torch.randn(3, 48)
    before, seen = norm(x), []
    assert use_faster_forms_(nn.Sequential(norm)) == ["0"] and type(norm) is TwoPassLayerNorm
    assert torch.equal(norm(x), before)

    def note(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend=note)
    torch.testing.assert_close(compiled(x), before)
    assert any("rsqrt" in name for name in seen) and not any("layer_norm" in name for name in seen)
    wide = nn.LayerNorm((4, 48))
    assert use_faster_forms_(nn.Sequential(wide)) == [] and type(wide) is nn.LayerNorm


@torch.no_grad()
def test_norms_that_would_not_be_the_same_stay(calls):
    """Of autocast, which computes them in float32, of float64, and of a width that is wrong."""
    norm = nn.LayerNorm(48, elementwise_affine=False)
    use_faster_forms_(nn.Sequential(norm))
    torch.compiler.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(3, 48).bfloat16()
        assert compiled(x).dtype == norm(x).dtype
    exact = torch.randn(3, 48, dtype=torch.float64)
    assert torch.equal(compiled(exact), norm(exact))
    with pytest.raises(Exception, match="normalized_shape"):
        compiled(torch.randn(3, 96))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_one_compiled_graph(calls):
    layer, x = make_feed_forward()
    use_faster_forms_(layer)
    expected = layer(x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    assert len(calls) == 2


def test_apply_uses_them_beside_fp8_layers(calls):
    """Those whose product stays in 16 bits, and says so."""
    model = make_transformer().bfloat16()
    changes = apply_(model, Recipe(linear="fp8", ignored_layers=["ff"]))
    faster = changes.faster["linear"]
    assert "transformer_blocks.0.ff.net.0" in faster
    assert "transformer_blocks.0.ff_context.net.0" not in faster
    assert isinstance(model.transformer_blocks[0].ff_context.net[0].proj, Fp8Linear)
    assert "transformer_blocks.0.norm2" in faster and "norm_out.norm" in faster
    assert f"linear: {len(faster)} plain layers have a faster form on a GPU" in str(changes)
    assert type(make_transformer().norm_out.norm) is nn.LayerNorm


def test_attention_alone_leaves_them():
    model = make_transformer()
    assert not apply_(model, Recipe(attention="fp8")).faster
    assert type(model.norm_out.norm) is nn.LayerNorm


@torch.no_grad()
def test_a_pipeline_saved_and_loaded(folder_of, calls, tmp_path):
    """The img_mlp of Qwen-Image stays in 16 bits by default."""
    pipe = load_pipeline(folder_of("qwen_image"))
    names = apply_(pipe, Recipe(linear="fp8")).faster["transformer.linear"]
    assert "transformer_blocks.0.img_mlp.net.0" in names
    before = run_pipeline(pipe, "qwen_image")
    num_calls = len(calls)
    pipe.save_pretrained(tmp_path)
    again = load_pipeline(tmp_path)
    assert type(again.transformer.transformer_blocks[0].img_mlp.net[0]) is FusedGelu
    assert torch.equal(run_pipeline(again, "qwen_image"), before)
    assert len(calls) == 2 * num_calls > 0


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu(dtype):
    """A norm and a feed-forward, compiled, against float32; no kernel of GELU is left."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.LayerNorm(1536), FeedForward(1536, activation_fn="gelu-approximate"))
    layer = layer.to("cuda", dtype).eval()
    x = torch.randn(1, 1030, 1536, device="cuda", dtype=dtype) + 0.5
    truth = of_float32(layer, x)
    stock = torch.compile(copy.deepcopy(layer), fullgraph=True)(x)
    assert use_faster_forms_(layer) == ["0", "1.net.0"]
    eager = layer(x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    compiled(x)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        found = compiled(x)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("gelu" in name for name in names)
    assert not any(name.startswith("triton_poi") and "gelu" in name for name in names)
    limit = 1.02 * relative_rms(stock, truth)
    assert 0 < relative_rms(eager, truth) <= limit < 0.01
    assert 0 < relative_rms(found, truth) <= limit
