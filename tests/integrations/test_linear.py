"""quantize_: which linear layers it replaces, which it leaves and why, and what it refuses."""

import gc
import weakref

import pytest
import torch
from torch import nn

from octavo import ConfigError, Recipe, UnsupportedError, apply_, quantize_, restore_
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import CheckpointError
from octavo.integrations.linear import plan_linear
from octavo.kernels.device import Device
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.ops import check
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.img_mlp = nn.Sequential(nn.Linear(width, 70), nn.GELU(), nn.Linear(70, width))
        self.gate = nn.Linear(width, 32)
        self.scale = nn.Linear(width, 1)

    def forward(self, x):
        return x + self.img_mlp(x) * self.scale(x) + self.gate(x).mean(-1, keepdim=True)


class Model(nn.Module):
    """Odd sizes, a router, a small layer, and a head."""

    def __init__(self, width=63, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 40)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_output_embeddings(self):
        return self.head


CHOSEN = [f"blocks.{block}.img_mlp.{layer}" for block in range(4) for layer in (0, 2)]


def make(**options):
    torch.manual_seed(0)
    return Model(**options).requires_grad_(False)


def fp8_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


def state(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_untouched(model, before):
    assert not fp8_layers(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, x in after.items():
        assert_same_bits(x, before[name])


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


def test_applying_twice():
    model = make()
    quantize_(model, ignored_layers=["0"])
    x = Draw(1).normal(5, 63)
    before = model(x)
    for again in (lambda: quantize_(model), lambda: apply_(model, Recipe(linear="fp8"))):
        with pytest.raises(ConfigError, match="got 6 in FP8 already, such as blocks.1.img_mlp.0"):
            again()
    assert_same_bits(model(x), before)


def test_weights_cannot_be_restored():
    model = make()
    quantize_(model)
    with pytest.raises(UnsupportedError, match="8 that are FP8 now, .* load the model again"):
        restore_(model)
    assert fp8_layers(model) == CHOSEN
    # A layer that was made in FP8, as a loader does, has no other weight to go back to.
    made = nn.Sequential(Fp8Linear(32, 32, LinearSettings()))
    with pytest.raises(ConfigError, match="as it was made"):
        restore_(made)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_bad_weight_at_the_end_and_nothing_is_changed(bad):
    model = make()
    model.blocks[3].img_mlp[2].weight[3, 4] = bad
    before = state(model)
    with pytest.raises(ConfigError, match="blocks.3.img_mlp.2: expected a finite weight, got 1"):
        quantize_(model)
    assert_untouched(model, before)
    quantize_(model, ignored_layers=["blocks.3.img_mlp.2"])


def test_hooks_would_be_lost():
    model = make()
    before = state(model)
    hook = model.blocks[2].img_mlp[0].register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(UnsupportedError, match="blocks.2.img_mlp.0: .* without hooks"):
        quantize_(model)
    hook.remove()
    model.blocks[2].img_mlp[0].forward = lambda x: x
    with pytest.raises(UnsupportedError, match="blocks.2.img_mlp.0: .* without hooks"):
        quantize_(model)
    del model.blocks[2].img_mlp[0].forward
    assert_untouched(model, before)
    quantize_(model)


def test_weights_that_are_not_there():
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match="one on meta: load it first"):
        quantize_(model)


def test_a_gpu_without_fp8(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = make()
    before = state(model)
    with pytest.raises(
        UnsupportedError, match=r"blocks.0.img_mlp.0: .*\(sm_80\): .*\(activation=N"
    ):
        quantize_(model)
    assert_untouched(model, before)
    quantize_(model, {"activation": None})
    assert model(Draw(1).normal(5, 63)).isfinite().all()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: quantize_(model, "int4"), "expected None, 'fp8' or settings"),
        (lambda model: quantize_(model, None), "expected 'fp8' or settings of linear layers, got"),
        (lambda model: quantize_(model, Recipe(kv_cache="fp8")), "got kv_cache: use apply_"),
        (lambda model: quantize_(model, Recipe()), "got an empty one: use apply_"),
        (
            lambda model: quantize_(model, Recipe(linear="fp8"), ignored_layers=["0"]),
            "expected ignored_layers, weight_only_layers and scales in the recipe",
        ),
        (
            lambda model: quantize_(model, {"ignored_layers": ["0"]}, ignored_layers=["1"]),
            "expected ignored_layers once",
        ),
        (lambda model: quantize_(model, {"bits": 8}), "unknown key 'bits'"),
        (lambda model: quantize_(model, ignored_layers="0"), "expected a list of patterns"),
        (lambda model: quantize_(model, {"scaling": "static"}), "needs scales, got none"),
        (lambda model: quantize_(model, scales={"a": {"input": 1.0}}), "nothing has scaling 'st"),
        (lambda model: quantize_(nn.Linear(32, 32)), "Fp8Linear.from_linear makes one of it"),
        (lambda model: quantize_(nn.LayerNorm(4)), "left alone are none"),
    ],
)
def test_calls_that_are_refused(call, said):
    model = make()
    before = state(model)
    with pytest.raises(ConfigError) as caught:
        call(model)
    assert said in str(caught.value)
    assert_untouched(model, before)


INPUTS = dict.fromkeys(CHOSEN, 0.05)


def test_static_scales_are_given_to_their_layers():
    model = make()
    scales = {name: {"input": 0.01 * (i + 1)} for i, name in enumerate(CHOSEN)}
    quantize_(model, {"activation_scheme": "static"}, scales=scales)
    for i, name in enumerate(CHOSEN):
        layer = model.get_submodule(name)
        assert float(layer.input_scale) == pytest.approx(0.01 * (i + 1))
        assert layer.settings.scaling == "static"


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({n: 1.0 for n in CHOSEN[1:]}, "expected input scales for 'blocks.0.img_mlp.0', got none"),
        ({**INPUTS, CHOSEN[3]: float("nan")}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: float("inf")}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: 0.0}, "positive finite"),
        ({**INPUTS, CHOSEN[3]: -1.0}, "positive finite"),
    ],
)
def test_scales_that_are_missing_or_bad(inputs, said):
    model = make()
    before = state(model)
    scales = {name: {"input": scale} for name, scale in inputs.items()}
    with pytest.raises((ConfigError, CheckpointError), match=said):
        quantize_(model, {"activation_scheme": "static"}, scales=scales)
    assert_untouched(model, before)


def test_scales_for_something_else():
    model = make()
    attention = {"octavo": {"format_version": 1, "kind": "kv_cache"}}
    document = attention | {"layers": {"a": {"q": 1.0, "k": 1.0, "v": 1.0}}}
    with pytest.raises(CheckpointError, match="for linear, got a file for kv_cache: octavo.cal"):
        quantize_(model, {"activation_scheme": "static"}, scales=ScaleSet.from_dict(document))


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
