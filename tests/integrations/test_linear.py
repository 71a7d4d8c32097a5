"""quantize_: which linear layers it replaces, and which it leaves and why."""

import gc
import weakref

import pytest
import torch
from torch import nn

from octavo import ConfigError, Recipe, apply_, quantize_
from octavo.integrations.linear import plan_linear
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw
from octavo_testkit.models.small_linear_model import (
    CHOSEN,
    assert_untouched,
    fp8_layers,
    make,
    state,
)


def test_what_is_replaced_and_what_is_left():
    model = make()
    x = Draw(1).normal(5, 63)
    before = model(x)
    changes = quantize_(model)
    assert fp8_layers(model) == changes.layers["linear"] == CHOSEN
    left = changes.left["linear"]
    assert left["head"] == "an output head"
    assert left["blocks.2.gate"] == "a router of experts"
    assert left["blocks.3.scale"] == "small: 63 to 1"
    assert len(left) == 9
    assert str(changes).splitlines()[0] == "linear: 8 layers"
    assert "linear: head stays as it is (an output head)" in str(changes)
    assert "4 layers stay as they are (small: 63 to 1): 'blocks.0.scale'" in str(changes)
    assert 0 < relative_rms(model(x), before) < 0.04  # two products of 3.8 % beside x itself
    assert [model.get_submodule(name).name for name in CHOSEN] == CHOSEN


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        {},
        {"method": "fp8"},
        LinearSettings(),
        Recipe(linear="fp8"),
        {"method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
    ],
    ids=str,
)
def test_configs_that_mean_the_same(config):
    model, other = make(), make()
    quantize_(model, config)
    apply_(other, Recipe(linear="fp8"))
    x = Draw(1).normal(5, 63)
    assert_same_bits(model(x), other(x))


def test_the_words_of_vllm():
    model = make()
    config = {"method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["blocks.1"]}
    quantize_(model, config)
    assert fp8_layers(model) == [name for name in CHOSEN if "blocks.1." not in name]
    layer = model.blocks[0].img_mlp[0]
    assert layer.settings == LinearSettings(weight="block 128x128", activation="block 1x128")
    assert config["ignored_layers"] == ["blocks.1"]  # what was given is not changed


@pytest.mark.parametrize(
    ("patterns", "ignored"),
    [
        (["img_mlp.0"], [name for name in CHOSEN if name.endswith(".0")]),
        (["blocks.2"], CHOSEN[4:6]),
        (["1"], CHOSEN[2:4]),
        (["0-2"], CHOSEN[:6]),
        (["*.img_mlp.2"], CHOSEN[1::2]),
        (["re:[13].*0$"], [CHOSEN[2], CHOSEN[6]]),
        (["0", "re:3.img"], CHOSEN[:2] + CHOSEN[6:]),
        (["head", "gate"], []),  # left alone anyway
    ],
    ids=str,
)
def test_ignored_layers(patterns, ignored):
    model = make()
    changes = apply_(model, Recipe(linear="fp8", ignored_layers=patterns))
    assert fp8_layers(model) == [name for name in CHOSEN if name not in ignored]
    for name in ignored:
        assert changes.left["linear"][name] == "ignored_layers"
        assert type(model.get_submodule(name)) is nn.Linear


@pytest.mark.parametrize("pattern", ["img_mpl", "4", "7-9", "*.txt_mlp.*", "re:^mlp", "blocks"])
def test_a_pattern_that_matches_nothing_lists_what_exists(pattern):
    model = make()
    before = state(model)
    patterns = ["0", pattern] if pattern != "blocks" else [pattern]
    if pattern == "blocks":  # matches everything but the head, which is left by default
        with pytest.raises(ConfigError, match="expected linear layers to quantize, got none in M"):
            quantize_(model, ignored_layers=patterns)
    else:
        with pytest.raises(ConfigError, match="matches none of the 17 layers") as caught:
            quantize_(model, ignored_layers=patterns)
        assert "'blocks.0.img_mlp.0'" in str(caught.value)
    assert_untouched(model, before)


class Odd(nn.Linear):
    """Someone else's."""


class OddEmbedding(nn.Embedding):
    """Not like a linear layer."""


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 32))


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})


class Kept(nn.Module):
    _keep_in_fp32_modules = ("wo",)

    def __init__(self):
        super().__init__()
        self.wo, self.wow = nn.Linear(32, 32), nn.Linear(32, 32)


def test_layers_that_are_no_plain_linear_layers_are_named():
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 32),
            "odd": Odd(32, 32),
            "conv": Conv1D(),
            "mlp": nn.ModuleDict({"experts": Experts()}),
            "lora": Adapter(),
            "kept": Kept(),
            "attention": nn.MultiheadAttention(32, 2),
            "torch": nn.TransformerEncoderLayer(32, 2, 32),
            "embedding": nn.Embedding(32, 32),
            "odd_embedding": OddEmbedding(32, 32),
            "norm": nn.LayerNorm(32),
            "convolution": nn.Conv2d(3, 32, 3),
            "lm_head": nn.Linear(32, 64),
            "switch": nn.ModuleDict({"router": nn.Linear(32, 32)}),
        }
    )
    plan = plan_linear(model)
    adapter = "part of Adapter, an adapter: quantize before adding it"
    assert plan.left == {
        "odd": "Odd, not a plain nn.Linear",
        "conv": "Conv1D, not a plain nn.Linear",
        "mlp.experts": "Experts, not a plain nn.Linear",
        "lora.base_layer": adapter,
        "lora.lora_A.default": adapter,
        "kept.wo": "its model keeps it in float32",
        "attention.out_proj": "NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "torch.self_attn.out_proj": "NonDynamicallyQuantizableLinear, not a plain nn.Linear",
        "torch.linear1": "TransformerEncoderLayer reads its weight",
        "torch.linear2": "TransformerEncoderLayer reads its weight",
        "lm_head": "an output head",
        "switch.router": "a router of experts",
    }
    assert list(plan.chosen) == ["plain", "kept.wow"]


def test_tied_weights_stay_tied():
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
    model.up, model.same = nn.Linear(32, 32), nn.Linear(32, 32)
    model.free = nn.Linear(32, 32)
    model.head.weight, model.same.weight = model.embedding.weight, model.up.weight
    changes = quantize_(model)
    assert changes.left["linear"] == {
        "head": "tied to embedding",
        "up": "tied to same",
        "same": "tied to up",
    }
    assert fp8_layers(model) == ["free"]
    assert model.head.weight is model.embedding.weight


def test_a_layer_with_two_names_is_replaced_under_both():
    model = nn.Module()
    model.a = nn.Linear(32, 32)
    model.b = nn.Sequential(model.a, nn.ReLU())
    assert quantize_(model).layers["linear"] == ["a"]
    assert isinstance(model.a, Fp8Linear) and model.b[0] is model.a


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_in_any_dtype(dtype):
    model = make().to(dtype)
    x = Draw(1).normal(2, 5, 63, dtype=dtype)
    before = model(x)
    quantize_(model)
    after = model(x)
    assert after.dtype == dtype and relative_rms(after, before) < 0.05
    weights = state(model)
    moved = model.to(torch.float32)
    name = f"{CHOSEN[0]}.weight"
    assert_same_bits(moved.state_dict()[name], weights[name])


def test_a_state_dict_goes_into_another_model():
    model, other = make(), make()
    quantize_(model)
    with torch.no_grad():
        for x in other.parameters():
            x += 1
    quantize_(other)
    other.load_state_dict(model.state_dict())
    x = Draw(1).normal(5, 63)
    assert_same_bits(other(x), model(x))


@pytest.mark.slow
def test_old_weights_are_freed_one_by_one(monkeypatch):
    model = make()
    old = {name: weakref.ref(model.get_submodule(name).weight) for name in CHOSEN}
    alive = []
    convert = Fp8Linear.from_linear.__func__

    def count(cls, plain, *args, **kwargs):
        gc.collect()
        alive.append(sum(weight() is not None for weight in old.values()))
        return convert(cls, plain, *args, **kwargs)

    monkeypatch.setattr(Fp8Linear, "from_linear", classmethod(count))
    quantize_(model)
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]
    assert all(weight() is None for weight in old.values())


def test_static_scales_are_given_to_their_layers():
    model = make()
    scales = {name: {"input": 0.01 * (i + 1)} for i, name in enumerate(CHOSEN)}
    quantize_(model, {"activation_scheme": "static"}, scales=scales)
    for i, name in enumerate(CHOSEN):
        layer = model.get_submodule(name)
        assert float(layer.input_scale) == pytest.approx(0.01 * (i + 1))
        assert layer.settings.scaling == "static"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"weight": "block 128x128"}, {"activation": None}], ids=str
)
def test_a_quantized_model_compiles_to_one_graph(options):
    model = make()
    quantize_(model, options)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (5, 7):
        x = Draw(rows).normal(rows, 63)
        assert_same_bits(run(x), model(x))
