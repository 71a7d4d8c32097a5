"""Fp8Linear: its error, its padding, its state dict, its shards and what it refuses."""

import copy
import math

import pytest
import torch
from torch import nn

from octavo import ops
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.kernels.device import Device
from octavo.layers.linear import FEW_ROWS, MAX_FUSED, Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerTensor, parse_granularity
from octavo.numerics.quantize import quantize
from octavo.ops import check
from octavo.recipe import LinearSettings
from octavo.reference import gemm
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.inputs import Draw

# Three bits of mantissa: an error of up to 2^-4 of the power of two below the value m · 2^e, evenly
# spread; of mantissas that are even in their logarithm, E[1/m²] = 3 / (8 ln 2). It is 2.66 %.
E4M3_RMS = 2**-4 / math.sqrt(3) * math.sqrt(3 / (8 * math.log(2)))
SAMPLING = 1.25  # sums of some hundred errors are not yet their mean

SETTINGS = {
    "channel by token": {},
    "channel by tensor": {"activation": "tensor"},
    "tensor by tensor": {"weight": "tensor", "activation": "tensor"},
    "tensor by token": {"weight": "tensor"},
    "block by block": {"weight": "block 128x128"},
    "block by token": {"weight": "block 128x128", "activation": "token"},
    "channel by block": {"activation": "block 1x128"},
    "static": {"scaling": "static"},
    "static block": {"weight": "block 128x128", "scaling": "static"},
    "weight only": {"activation": None},
    "weight only block": {"weight": "block 128x128", "activation": None},
}
SIZES = [(64, 48), (63, 48), (64, 33), (17, 23), (300, 130), (16, 16)]
A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)


def make_plain(depth=64, columns=48, *, bias=True, dtype=torch.float32, seed=0):
    draw = Draw(seed)
    plain = nn.Linear(depth, columns, bias=bias, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(draw.normal(columns, depth))
        if bias:
            plain.bias.copy_(draw.normal(columns))
    return plain.requires_grad_(False)


def make(plain, options, x=None, **more):
    settings = LinearSettings(**options)
    if settings.scaling == "static":
        more["input_scale"] = float((4.0 if x is None else x.abs().max()) / E4M3.max)
    return Fp8Linear.from_linear(plain, settings, name="block.3.up", **more)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_error_is_that_of_e4m3(options, sizes):
    depth, columns = sizes
    plain = make_plain(depth, columns, bias=False)
    x = Draw(1).normal(64, depth)
    truth = x.double() @ plain.weight.double().t()
    num_operands = 1 if LinearSettings(**options).activation is None else 2
    expected = math.sqrt(num_operands) * E4M3_RMS
    actual = relative_rms(make(plain, options, x)(x), truth)
    assert expected / SAMPLING / 1.1 < actual < expected * SAMPLING


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_is_that_of_the_reference(options, sizes, dtype):
    """Padding, bias and dtype change nothing that quantizing each operand does not."""
    depth, columns = sizes
    plain = make_plain(depth, columns, dtype=dtype)
    x = Draw(1).normal(2, 3, depth, dtype=dtype)
    layer = make(plain, options, x)
    settings = layer.settings
    rows = x.reshape(-1, depth)
    operand = rows
    if settings.scaling == "static":
        operand = quantize(rows, PerTensor(), scale=layer.input_scale)
    elif settings.activation is not None:
        operand = quantize(rows, parse_granularity(settings.activation))
    weight = quantize(plain.weight, parse_granularity(settings.weight))
    actual = layer(x)
    assert actual.dtype == dtype and actual.shape == (2, 3, columns) and actual.is_contiguous()
    model = gemm.scaled_mm(operand, weight, plain.bias).reshape(actual.shape)
    truth = x.double() @ plain.weight.double().t() + plain.bias.double()
    assert_within_budget(actual, truth=truth, model=model)
    assert relative_rms(actual, model) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(48,), (1, 48), (0, 48), (2, 0, 48), (2, 1, 3, 48)], ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_leading_dimensions(shape, options):
    plain = make_plain(48, 20)
    layer = make(plain, options)
    x = Draw(2).normal(*shape)
    actual = layer(x)
    assert actual.shape == (*shape[:-1], 20)
    if actual.numel() and layer.settings.activation != "tensor":
        each = [layer(row) for row in x.reshape(-1, 48)]
        assert relative_rms(actual.reshape(-1, 20), torch.stack(each)) < 1e-6


def test_an_input_with_strides():
    layer = make(make_plain(48, 20), {})
    x = Draw(2).normal(48, 5).t()
    assert_same_bits(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("sizes", [(64, 48), (63, 21), (300, 130)], ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_state_dict_has_true_sizes_and_comes_back_to_the_bit(options, sizes, is_assigned):
    depth, columns = sizes
    layer = make(make_plain(depth, columns, dtype=torch.bfloat16), options)
    state = layer.state_dict()
    assert state["weight"].shape == (columns, depth) and state["weight"].dtype == E4M3.dtype
    assert state["bias"].shape == (columns,)
    granularity = parse_granularity(layer.settings.weight)
    assert state["weight_scale"].shape == granularity.scale_shape((columns, depth))
    assert ("input_scale" in state) == (layer.settings.scaling == "static")
    device = "meta" if is_assigned else None
    other = Fp8Linear(depth, columns, layer.settings, device=device, dtype=torch.bfloat16)
    other.load_state_dict(state, assign=is_assigned)
    for name, x in other.state_dict().items():
        assert_same_bits(x, state[name])
    x = Draw(3).normal(5, depth, dtype=torch.bfloat16)
    assert_same_bits(other(x), layer(x))
    assert other.weight.shape == layer.weight.shape  # padded again


def test_sizes_are_padded_to_what_matrix_products_read():
    layer = make(make_plain(63, 33), {})
    assert layer.weight.shape == (48, 64) and (layer.in_features, layer.out_features) == (63, 33)
    assert layer.weight_scale.shape == layer.bias.shape == (48,)
    assert layer.dequantize().shape == (33, 63)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_implementations_see_sizes_that_they_are_fast_at(options):
    shapes = []

    def run(a, b, bias, *, out_dtype, activation, scale=None):
        assert (scale is None) == (options.get("scaling") != "static")
        data = a if isinstance(a, torch.Tensor) else a.data
        shapes.append((*data.shape, *b.data.shape, *bias.shape))
        return data.new_zeros(len(data), len(b.data), dtype=out_dtype)

    ops.register_impl("scaled_mm", "mine", run)
    try:
        layer = make(make_plain(63, 33), options, impl="mine")
        assert layer(torch.ones(5, 63)).shape == (5, 33)
    finally:
        ops.unregister_impl("scaled_mm", "mine")
    assert shapes == [(5, 64, 48, 64, 48)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(21, 63)}, "weight: expected torch.float8_e4m3fn, got torch.fl"),
        ({"weight": torch.zeros(21, 64).to(E4M3.dtype)}, r"weight: expected shape \[21, 63\]"),
        ({"weight_scale": torch.ones(21).bfloat16()}, "weight_scale: expected torch.float32"),
        ({"weight_scale": torch.ones(())}, r"weight_scale: expected shape \[21\], got \[\]"),
        ({"weight_scale": torch.zeros(21)}, "weight_scale: expected positive finite scales"),
        ({"weight_scale": torch.full((21,), torch.nan)}, "expected positive finite scales"),
        ({"bias": torch.zeros(32)}, r"bias: expected shape \[21\], got \[32\]"),
        ({"weight_scale": None}, "Missing key.*weight_scale"),
        ({"input_scale": torch.ones(())}, "Unexpected key.*input_scale"),
    ],
)
def test_a_state_dict_that_does_not_fit(change, said):
    layer = make(make_plain(63, 21), {})
    state = {k: x for k, x in (layer.state_dict() | change).items() if x is not None}
    before = layer.state_dict()["weight"].clone()
    with pytest.raises(RuntimeError, match=said):
        layer.load_state_dict(state)
    assert_same_bits(layer.state_dict()["weight"], before)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())
def test_it_takes_the_tensors_of_a_state_dict_without_any_of_its_own(options, sizes):
    depth, columns = sizes
    layer = make(make_plain(depth, columns, dtype=torch.bfloat16), options)
    other = Fp8Linear(depth, columns, layer.settings, device="meta", dtype=torch.bfloat16)
    state = layer.state_dict()
    other.take_(state)
    for name, x in other.state_dict().items():
        assert_same_bits(x, state[name])
    x = Draw(3).normal(5, depth, dtype=torch.bfloat16)
    assert_same_bits(other(x), layer(x))
    assert not other.bias.requires_grad
    if depth % 16 == columns % 16 == 0:
        assert other.weight.data_ptr() == state["weight"].data_ptr()


def test_it_takes_no_tensors_that_are_not_its_own():
    layer = make(make_plain(63, 21), {})
    for name, x, said in (
        ("weight", torch.zeros(21, 63), "expected torch.float8_e4m3fn, got torch.float32"),
        ("weight", torch.zeros(21, 64).to(E4M3.dtype), r"expected shape \[21, 63\]"),
        ("weight_scale", torch.ones(22), r"expected shape \[21\], got \[22\]"),
        ("weight_scale", torch.zeros(21), "expected positive finite scales"),
        ("weight_scale", torch.ones(21).bfloat16(), "expected torch.float32"),
        ("bias", torch.zeros(32), r"expected shape \[21\]"),
    ):
        before = layer.state_dict()[name].clone()
        with pytest.raises(CheckpointError, match=f"block.3.up: {name}: {said}"):
            layer.take_({name: x})
        assert_same_bits(layer.state_dict()[name], before)


def test_a_layer_that_was_not_loaded_shows_it():
    layer = Fp8Linear(32, 32, LinearSettings())
    assert layer(torch.ones(2, 32)).isnan().all()


@pytest.mark.parametrize("change", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_change_of_dtype_leaves_weight_and_scales(change):
    layer = make(make_plain(63, 21), {"scaling": "static"})
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    layer.to(change)
    for name in ("weight", "weight_scale", "input_scale"):
        assert_same_bits(layer.state_dict()[name], before[name])
    assert layer.bias.dtype == change
    for method in ("half", "bfloat16", "float"):
        getattr(layer, method)()
    for name in ("weight", "weight_scale", "input_scale"):
        assert_same_bits(layer.state_dict()[name], before[name])


def test_it_is_not_the_first_parameter_that_models_ask_for_their_dtype():
    model = nn.Sequential(make(make_plain(), {}), nn.LayerNorm(48).bfloat16())
    assert {x.dtype for x in model.parameters()} == {torch.float32, torch.bfloat16}


def test_a_copy_is_the_same():
    layer = make(make_plain(63, 21), {})
    x = Draw(3).normal(5, 63)
    assert_same_bits(copy.deepcopy(layer)(x), layer(x))


def test_zero_rows_have_scale_one():
    plain = make_plain(32, 32)
    plain.weight[3:5] = 0
    layer = make(plain, {})
    assert layer.weight_scale[3:5].tolist() == [1.0, 1.0]
    assert_same_bits(layer(torch.ones(1, 32))[0, 3:5], plain.bias[3:5])
    plain.weight[:] = 0
    for options in SETTINGS.values():
        made = make(plain, options)
        assert (made.weight_scale == 1).all()
        assert_same_bits(made(torch.ones(1, 32))[0], plain.bias)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_is_not_finite_is_refused_by_name(bad, dtype):
    plain = make_plain(32, 32, dtype=dtype)
    plain.weight[3, 5] = bad
    with pytest.raises(ConfigError, match="layer block.3.up: expected a finite weight, got 1 NaN"):
        make(plain, {})


SHARDS = (32, 16, 15)


@pytest.mark.parametrize("sizes", [(64, SHARDS), (63, (16, 16)), (48, (7, 9, 5))], ids=str)
@pytest.mark.parametrize("options", [{"activation": None}, {}, {"activation": "tensor"}], ids=str)
def test_shards_keep_a_scale_each(sizes, options):
    """A fused projection is the projections side by side, to the bit."""
    depth, shards = sizes
    parts = [make_plain(depth, size, seed=seed) for seed, size in enumerate(shards)]
    for factor, part in zip((1.0, 300.0, 0.01), parts, strict=False):
        part.weight *= factor
    fused = make_plain(depth, sum(shards))
    fused.weight.copy_(torch.cat([part.weight for part in parts]))
    fused.bias.copy_(torch.cat([part.bias for part in parts]))
    options = {"weight": "tensor", **options}
    layer = make(fused, options, shards=shards)
    each = [make(part, options) for part in parts]
    x = Draw(5).normal(6, depth)
    assert_same_bits(
        layer.state_dict()["weight_scale"], torch.stack([e.weight_scale for e in each])
    )
    assert_same_bits(
        layer.state_dict()["weight"].view(torch.uint8),
        torch.cat([e.state_dict()["weight"].view(torch.uint8) for e in each]),
    )
    expected = torch.cat([e(x) for e in each], dim=1)
    assert relative_rms(layer(x), expected) < 1e-6
    other = Fp8Linear(depth, sum(shards), layer.settings, shards=shards)
    other.load_state_dict(layer.state_dict())
    assert_same_bits(other(x), layer(x))
    # One scale for all would round the smallest shard away.
    alone = make(fused, options)
    smallest = x.double() @ parts[-1].weight.double().t() + parts[-1].bias.double()
    columns = slice(sum(shards[:-1]), None)
    assert relative_rms(layer(x)[:, columns], smallest) < 0.05
    if len(shards) == 3:
        product = alone(x)[:, columns] - parts[-1].bias
        exact = smallest - parts[-1].bias.double()
        assert relative_rms(product, exact) > 2 * relative_rms(each[-1](x) - parts[-1].bias, exact)


@pytest.mark.parametrize("options", [{}, {"weight": "block 128x128"}], ids=str)
def test_shards_change_nothing_where_channels_or_blocks_have_scales(options):
    plain = make_plain(40, 256 + 40)
    x = Draw(5).normal(6, 40)
    layer = make(plain, options, shards=(128, 128, 40))
    assert_same_bits(layer(x), make(plain, options)(x))


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        ({}, {"shards": (32, 15)}, "shards that add up to 48 outputs, got \\(32, 15\\)"),
        ({}, {"shards": (48, 0)}, "shards that add up"),
        ({}, {"shards": ()}, "shards that add up"),
        ({"weight": "block 128x128"}, {"shards": (32, 16)}, "whole blocks of 128 outputs"),
        ({}, {"input_scale": 0.1}, "expected static scaling for a given input_scale, got dynamic"),
        ({"scaling": "static"}, {}, "block.3.up: scaling is static: .* input_scale, got None"),
        ({"scaling": "static"}, {"input_scale": 0.0}, "positive finite input_scale, got 0.0"),
        ({"scaling": "static"}, {"input_scale": math.nan}, "input_scale, got nan"),
        ({"scaling": "static"}, {"input_scale": math.inf}, "input_scale, got inf"),
        ({"scaling": "static"}, {"input_scale": -1.0}, "input_scale, got -1.0"),
    ],
)
def test_what_cannot_be_made(options, more, said):
    with pytest.raises(ConfigError, match=said):
        Fp8Linear.from_linear(make_plain(), LinearSettings(**options), name="block.3.up", **more)


def test_sizes_and_weights_that_are_refused():
    with pytest.raises(ConfigError, match="expected sizes from 1 on"):
        Fp8Linear(0, 4, LinearSettings())
    with pytest.raises(ConfigError, match="one on meta: load it first"):
        Fp8Linear.from_linear(nn.Linear(16, 16, device="meta"), LinearSettings())
    with pytest.raises(ConfigError, match="got torch.float64"):
        Fp8Linear.from_linear(nn.Linear(16, 16).double(), LinearSettings())
    with pytest.raises(ConfigError, match=r"expected a weight \[16, 8\], got \[8, 16\]"):
        Fp8Linear(8, 16, LinearSettings()).quantize_weight_(torch.zeros(8, 16))


def test_inputs_that_are_refused():
    layer = make(make_plain(), {})
    with pytest.raises(ConfigError, match=r"block.3.up: expected x \[\.\.\., 64\], got \[2, 63\]"):
        layer(torch.zeros(2, 63))
    with pytest.raises(ConfigError, match=r"expected x \[\.\.\., 64\], got \[\]"):
        layer(torch.zeros(()))
    # As T5 does: hidden_states.to(self.wo.weight.dtype).
    with pytest.raises(ConfigError, match="got torch.float8_e4m3fn; .* ignored_layers"):
        layer(torch.zeros(2, 64).to(layer.weight.dtype))


def test_a_gpu_without_fp8_runs_weights_only(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    x = torch.ones(2, 64)
    message = r"block.3.up: expected a GPU with FP8 .*\(sm_80\): quantize the weight alone"
    for options in ({}, {"scaling": "static"}):
        with pytest.raises(UnsupportedError, match=message):
            make(make_plain(), options)(x)
    assert make(make_plain(), {"activation": None})(x).isfinite().all()
    assert make(make_plain(), {}, impl="reference")(x).isfinite().all()


def test_nan_and_inf_stay_in_their_rows():
    layer = make(make_plain(), {})
    x = Draw(1).normal(4, 64)
    clean = layer(x)
    x[1, 7] = torch.nan
    actual = layer(x)
    assert actual[1].isnan().all()
    assert_same_bits(actual[[0, 2, 3]], clean[[0, 2, 3]])


def test_static_activations_beyond_the_scale_saturate():
    layer = make(make_plain(bias=False), {"scaling": "static"}, torch.tensor(1.0))
    x = torch.full((1, 64), 100.0)
    out = layer(x)
    with pytest.warns(UserWarning, match=r"block\.3\.up \(100 % of its inputs, up to 100 times"):
        assert relative_rms(out, layer(torch.ones(1, 64))) < 1e-6


# Each takes the compiler seconds: one with padding and one without on every run.
QUICK = (("channel by token", (63, 21)), ("block by block", (64, 48)))


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        pytest.param(
            *(options, sizes),
            id=f"{name}, {sizes}",
            marks=[] if (name, sizes) in QUICK else pytest.mark.slow,
        )
        for name, options in SETTINGS.items()
        for sizes in ((64, 48), (63, 21))
    ],
)
def test_it_compiles_to_one_graph(options, sizes):
    torch.compiler.reset()  # all layers share one forward, whose graphs are counted
    layer = make(make_plain(*sizes), options)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 1):
        x = Draw(rows).normal(2, rows, sizes[0])
        assert_same_bits(run(x), layer(x))


@pytest.mark.parametrize(
    ("rows", "is_joint", "width", "is_before"),
    [
        (FEW_ROWS + 1, False, 64, True),
        (FEW_ROWS, False, 64, False),
        (1, True, 64, True),
        (FEW_ROWS + 1, True, MAX_FUSED + 16, False),
    ],
)
def test_a_compiler_sees_how_rows_are_quantized(rows, is_joint, width, is_before):
    torch.compiler.reset()
    layer = make(make_plain(width, 48), {})
    layer.is_joint = is_joint
    dtypes = []

    def note(graph, inputs):
        products = graph.graph.find_nodes(
            op="call_function", target=torch.ops.octavo.scaled_mm.default
        ) or graph.graph.find_nodes(op="call_function", target=torch.ops.octavo.scaled_mm)
        dtypes.extend(node.args[0].meta["example_value"].dtype for node in products)
        return graph.forward

    x = Draw(rows).normal(rows, width)
    assert_same_bits(torch.compile(layer, fullgraph=True, backend=note)(x), layer(x))
    assert dtypes == [E4M3.dtype if is_before else torch.float32]


class Lora(nn.Module):
    """An adapter as peft puts it on a layer."""

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("sizes", [(64, 48), (63, 21)], ids=str)
def test_an_adapter_on_top(sizes):
    layer = make(make_plain(*sizes), {})
    assert isinstance(layer, nn.Linear)  # what peft looks for
    lora = Lora(layer)
    x = Draw(1).normal(3, sizes[0])
    expected = layer(x) + x @ lora.lora_A.weight.t() @ lora.lora_B.weight.t()
    assert relative_rms(lora(x), expected) < 1e-6
    # It adds nothing to what it cannot add to: no merge, and no gradient through the product.
    with pytest.raises((RuntimeError, NotImplementedError), match="Float8"):
        layer.weight.data += torch.zeros_like(layer.weight, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="scaled_mm has no gradient"):
        lora(x.requires_grad_()).sum().backward()


def test_what_a_printed_model_shows():
    layer = make(make_plain(63, 21), {"activation": None})
    shown = "in_features=63, out_features=21, bias=True, weight=channel, activation=None"
    assert shown in repr(layer)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("size", [(64, 48), (17, 23)])
def test_a_layer_on_meta_takes_its_tensors_one_by_one(options, size):
    expected = make(make_plain(*size), options)
    made = Fp8Linear(*size, LinearSettings(**options), device="meta")
    for name, x in expected.state_dict().items():
        made.take_({name: x})
    for name, x in expected.state_dict().items():
        assert_same_bits(made.state_dict()[name], x)
    x = Draw(1).normal(3, size[0])
    assert_same_bits(made(x), expected(x))


@pytest.mark.parametrize(
    ("name", "x", "message"),
    [
        ("weight", torch.zeros(48, 64), "expected torch.float8_e4m3fn, got torch.float32"),
        ("weight", torch.zeros(48, 63).to(E4M3.dtype), r"expected shape \[48, 64\]"),
        ("weight_scale", torch.zeros(48), "expected positive finite scales"),
        ("weight_scale", torch.ones(48).bfloat16(), "expected torch.float32"),
        ("input_scale", torch.ones(()), "expected no input_scale"),
        ("bias", torch.zeros(48), "expected no bias"),
        ("name", torch.zeros(1), "expected no name"),
    ],
)
def test_tensors_that_a_layer_does_not_take(name, x, message):
    made = Fp8Linear(64, 48, LinearSettings(), bias=False, device="meta")
    with pytest.raises(CheckpointError, match=message):
        made.take_({name: x})


def test_a_name_is_read_only_to_raise():
    """What torch.compile sees read it compiles again for: each layer has another label."""
    layer = Fp8Linear.from_linear(torch.nn.Linear(32, 32), LinearSettings(), name="one")
    x = torch.randn(3, 32)
    expected = layer(x)
    del layer.label, layer.name
    assert torch.equal(layer(x), expected)
