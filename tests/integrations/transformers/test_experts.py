"""Mixtures of experts of transformers in FP8: what is quantized, how well, saved and loaded."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from octavo import ConfigError, Recipe, UnsupportedError, apply_, calibrate_linear, quantize_
from octavo.integrations.linear import STATIC_EXPERTS
from octavo.integrations.transformers.experts import put_, quantized, weights_of
from octavo.integrations.transformers.quantizer import OctavoConfig
from octavo.layers.experts import Fp8ExpertLinear
from octavo.numerics.error import relative_rms
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.experts_models import (
    FAMILIES,
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    draw_ids,
    make_mixture,
    mixture_inputs,
    mixtures,
    run_model,
)
from octavo_testkit.serving.tiny_engine import make_engine, make_request
from octavo_testkit.serving.tiny_engine import run as run_engine

# Normal values in e4m3 are off by 2.7 %. Gate, up and down are three factors, each the sum of
# products of two rounded operands: √(3 · 2) · 2.7 %, and half of that again as room.
BUDGET = 1.5 * 6**0.5 * 0.027
NAME = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Each mixture on the same tokens and routing, and what its weights take."""
    model = make_mixture(family)
    plain = {name: copy.deepcopy(module) for name, module in mixtures(model).items()}
    changes = quantize_(model)
    assert set(changes.experts["linear"]) == set(plain) <= set(changes.layers["linear"])
    assert "2 of them mixtures of experts" in str(changes)
    for name, old in plain.items():
        new = model.get_submodule(name)
        for num_tokens, top_k in ((1, 1), (1, 2), (33, 2), (33, 4)):
            inputs = mixture_inputs(num_tokens, top_k)
            with torch.no_grad():
                expected, out = old(*inputs), new(*inputs)
            assert out.dtype == expected.dtype and out.shape == expected.shape
            assert 0 < relative_rms(out, expected) < BUDGET
        weights = sum(x.nbytes for _, x in weights_of(old))
        assert sum(x.nbytes for x in new.buffers()) <= 0.52 * weights
        assert not list(weights_of(new))


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_models(family):
    """With all experts for each token, so that no rounding can choose others."""
    model = make_mixture(family, top_k=NUM_EXPERTS)
    before = run_model(model)
    quantize_(model)
    after = run_model(model)
    # Two blocks with attention and experts, whose errors add up beside the tokens themselves.
    assert after.isfinite().all() and 0 < relative_rms(after, before) < 2 * BUDGET


@pytest.mark.parametrize("kind", ["tensor", "block 128x128"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_granularities(family, kind):
    model = make_mixture(family)
    plain = copy.deepcopy(mixtures(model)[NAME])
    quantize_(model, {"weight": kind})
    with torch.no_grad():
        out, expected = (one(*mixture_inputs(17)) for one in (mixtures(model)[NAME], plain))
    assert 0 < relative_rms(out, expected) < BUDGET


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_and_weights_alone(dtype):
    """Weights alone: what is left is the rounding of the three weights."""
    model = make_mixture("qwen3_moe").to(dtype)
    plain = copy.deepcopy(mixtures(model)[NAME])
    changes = quantize_(model, weight_only_layers=["experts"])
    assert changes.weight_only["linear"] == list(mixtures(model))
    inputs = mixture_inputs(17, dtype=dtype)
    with torch.no_grad():
        out, expected = (one(*inputs) for one in (mixtures(model)[NAME], plain))
    assert out.dtype == dtype and 0 < relative_rms(out, expected) < BUDGET / 2**0.5
    assert mixtures(model)[NAME].fp8_down_proj.activation is None


# Module, class and config of mixtures that no tiny model above has, with their flags.
RARE = {
    "no gate": ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "relu2"}),
    "transposed, concatenated, biases": (
        *("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),
        {"swiglu_alpha": 1.7, "swiglu_limit": 7.0},
    ),
    "a norm": ("muse_spark", "MuseSparkExperts", {"post_norm_eps": 1e-6}),
    "GELU": ("gemma4", "Gemma4TextExperts", {"hidden_activation": "gelu_pytorch_tanh"}),
}


def make_rare(family, kind, own):
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    config = transformers.PreTrainedConfig(
        hidden_size=HIDDEN,
        moe_hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        moe_latent_size=None,
        hidden_act="silu",
        experts_implementation="eager",
        **dict.fromkeys(names, NUM_EXPERTS),
        **own,
    )
    torch.manual_seed(0)
    module = getattr(modeling, kind)(config)
    for x in module.parameters():
        torch.nn.init.normal_(x, std=0.1)
    return module.bfloat16()


@pytest.mark.parametrize("name", RARE)
def test_flags(name):
    plain = make_rare(*RARE[name])
    model = torch.nn.ModuleDict({"experts": copy.deepcopy(plain)})
    quantize_(model)
    inputs = mixture_inputs(21)
    with torch.no_grad():
        out, expected = model["experts"](*inputs), plain(*inputs)
    assert 0 < relative_rms(out, expected) < BUDGET


def test_ignored_layers_reach_experts_by_name_and_by_index():
    for patterns, left in ((["experts"], {0, 1}), (["1"], {1}), ([NAME], {0})):
        model = make_mixture("qwen3_moe")
        changes = quantize_(model, ignored_layers=patterns)
        names = [f"model.layers.{index}.mlp.experts" for index in sorted(left)]
        assert [n for n in changes.left["linear"] if n.endswith(".experts")] == names
        for index, name in enumerate(mixtures(model)):
            assert (len(list(weights_of(model.get_submodule(name)))) == 2) == (index in left)
        run_model(model)


def test_ignored_experts_run_as_they_did():
    """Octavo's implementation is that of the mixtures in FP8 alone."""
    model = make_mixture("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    quantize_(model, ignored_layers=["0"])
    first, second = mixtures(model).values()
    assert first.config._experts_implementation == "batched_mm"
    assert second.config._experts_implementation == "octavo"
    assert model.config._experts_implementation == "batched_mm"


def test_static_scaling_leaves_experts_and_says_why():
    model = make_mixture("qwen3_moe")
    scales = calibrate_linear(model, [{"input_ids": draw_ids()}])
    changes = quantize_(model, {"scaling": "static"}, scales=scales)
    assert changes.left["linear"][NAME] == STATIC_EXPERTS
    assert not changes.experts and changes.layers["linear"]


def test_routers_stay():
    model = make_mixture("qwen3_moe")
    changes = quantize_(model)
    assert f"{NAME.rpartition('.')[0]}.gate" in changes.left["linear"]
    assert mixtures(model)[NAME].fp8_down_proj.weight.dtype == torch.float8_e4m3fn
    assert model.model.layers[0].mlp.gate.weight.dtype == torch.bfloat16


def test_what_cannot_be_quantized_is_told_and_nothing_changes():
    model = make_mixture("qwen3_moe")
    with torch.no_grad():
        mixtures(model)[NAME].down_proj[3, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layers.0.mlp.experts.down_proj: expected a finite weig"):
        quantize_(model)
    model = make_mixture("qwen3_moe")
    mixtures(model)[NAME].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=f"{NAME}: expected experts without hooks"):
        quantize_(model)
    assert not any(isinstance(module, Fp8ExpertLinear) for module in model.modules())
    model = make_mixture("qwen3_moe")
    quantize_(model)
    with pytest.raises(ConfigError, match="plain linear layers, got .* in FP8 already"):
        quantize_(model)


def test_generating_and_deep_copies():
    """transformers changes the implementation of experts while it generates."""
    model = make_mixture("qwen3_moe")
    apply_(model, Recipe(linear="fp8"))
    ids = torch.arange(1, 9).reshape(1, -1)
    with torch.no_grad():
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert tokens.shape == (1, 12)
        assert_same_bits(run_model(copy.deepcopy(model)), run_model(model))


def test_torch_compile_sees_a_mixture_whole():
    model = make_mixture("gpt_oss")
    quantize_(model)
    module, inputs = mixtures(model)[NAME], mixture_inputs(9)
    with torch.no_grad():
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert relative_rms(compiled(*inputs), module(*inputs)) < 0.02


def same_states(one, other):
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, x in states[0].items():
        assert_same_bits(x, states[1][name])


RARER = [pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral", "deepseek_v3")]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *RARER])
def test_saved_and_loaded_to_the_bit(family, tmp_path):
    """Quantized while it loads, saved, and loaded again; quantize_ gives the same bits."""
    make_mixture(family).save_pretrained(tmp_path / "plain")
    kind = type(make_mixture(family))
    options = {"dtype": torch.bfloat16}
    expected = kind.from_pretrained(tmp_path / "plain", **options)
    quantize_(expected)
    config = OctavoConfig()
    loaded = kind.from_pretrained(tmp_path / "plain", quantization_config=config, **options)
    same_states(loaded, expected)
    assert_same_bits(run_model(loaded), run_model(expected))
    for number, model in enumerate((loaded, expected)):
        model.save_pretrained(tmp_path / str(number))
        again = kind.from_pretrained(tmp_path / str(number), **options)
        same_states(again, expected)
        assert_same_bits(run_model(again), run_model(expected))


@pytest.mark.parametrize("settings", [{"weight": "tensor"}, {"weight": "block 128x128"}], ids=str)
def test_other_settings_are_saved_and_loaded(settings, tmp_path):
    model = make_mixture("qwen3_moe")
    model.save_pretrained(tmp_path / "plain")
    config = OctavoConfig(settings, ignored_layers=["0"], weight_only_layers=["experts"])
    with pytest.raises(ConfigError, match="in both"):
        type(model).from_pretrained(tmp_path / "plain", quantization_config=config)
    config = OctavoConfig(settings, weight_only_layers=["experts"])
    options = {"dtype": torch.bfloat16}
    loaded = type(model).from_pretrained(tmp_path / "plain", quantization_config=config, **options)
    loaded.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", **options)
    same_states(again, loaded)
    assert mixtures(again)[NAME].fp8_down_proj.activation is None
    assert_same_bits(run_model(again), run_model(loaded))


def test_the_engine_runs_them():
    """Tokens are those of generate(), and the engine says what is in FP8."""
    model = make_mixture("qwen3_moe").float()
    engine = make_engine(model, Recipe(linear="fp8"))
    linear = engine.precision.words()["linear layers"]
    assert linear == "FP8 in 10 of 13 (3 in FP32)"  # 8 projections and 2 mixtures
    request = make_request(prompt=tuple(range(1, 12)))
    (completion,) = run_engine(engine, request)
    engine.close()
    ids = torch.tensor([request.prompt])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        expected = model.generate(ids, **options)[0, ids.shape[1] :]
    assert list(completion.tokens) == expected.tolist()


@pytest.mark.parametrize("activation", ["token", "tensor"])
def test_the_engine_knows_which_see_padding(activation):
    """With one scale for all tokens, those that pad a step would change the others."""
    model = make_mixture("qwen3_moe")
    changes = quantize_(model, {"activation": activation}, ignored_layers=["self_attn"])
    assert changes.layers["linear"] == changes.experts["linear"]
    engine = make_engine(model)
    assert engine._model.sees_padding == (activation == "tensor")
    engine.close()


def test_a_layer_that_is_put_by_hand():
    """The pieces by themselves: one weight in FP8, in place of a mixture's own."""
    module = mixtures(make_mixture("gpt_oss"))[NAME]
    plain = copy.deepcopy(module)
    for leaf, weight in list(weights_of(module)):
        put_(module, leaf, quantized(f"{NAME}.{leaf}", module, weight, LinearSettings()))
    assert module.fp8_gate_up_proj.weight.shape == (NUM_EXPERTS, 2 * INNER, HIDDEN)
    weight = plain.gate_up_proj.transpose(1, 2)
    assert relative_rms(module.fp8_gate_up_proj.dequantize(), weight) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_a_gpu(family):
    """As on the CPU, but for the order of sums; a mixture is replayed from a CUDA graph."""
    model = make_mixture(family)
    quantize_(model)
    inputs = mixture_inputs(33)
    with torch.no_grad():
        expected = {name: module(*inputs) for name, module in mixtures(model).items()}
        model.cuda()
        cuda = [x.cuda() for x in inputs]
        for name, module in mixtures(model).items():
            module(*cuda)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = module(*cuda)
            graph.replay()
            assert relative_rms(out.cpu(), expected[name]) < 0.02
        assert model(input_ids=draw_ids().cuda()).logits.isfinite().all()


@pytest.mark.gpu
def test_graphs_of_the_engine_on_a_gpu():
    """Tokens are those of steps without graphs: the routing is found inside them."""
    found = []
    for has_graphs in (False, True):
        model = make_mixture("qwen3_moe").to("cuda", torch.float32)
        engine = make_engine(model, Recipe(linear="fp8"), cuda_graphs=has_graphs)
        requests = [make_request(str(i), prompt=tuple(range(1 + i, 12 + i))) for i in range(3)]
        found.append([list(one.tokens) for one in run_engine(engine, *requests)])
        assert engine.has_graphs == has_graphs
        engine.close()
    assert found[0] == found[1] and all(map(len, found[0]))
