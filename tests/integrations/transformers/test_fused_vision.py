"""Attention modules whose forward hands its projections straight to FP8 attention."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo import ConfigError, Recipe, UnsupportedError, ops
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import fused_vision, vision
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_no_waiting, assert_same_bits
from octavo_testkit.models.vision_towers import FAMILIES, images, layers_of, make, run, run_layers

transformers = pytest.importorskip("transformers")

FP8 = Recipe(vision_attention="fp8")
# Of one layer's output against the model's dtype: the bound of the project for peaked softmax.
FP8_BUDGET = 0.07


def static(model):
    """The recipe with the scales that a model's layers have found."""
    scales = {
        vision.scale_name(layer.name): {
            part: scale.tolist() for part, scale in vars(layer.scaling.scales()).items()
        }
        for layer in layers_of(model)
    }
    return Recipe(vision_attention={"scaling": "static"}, scales=scales)


def calibrated(family, dtype=torch.float32, **sizes):
    """A tower, its inputs and a static recipe for it."""
    model, inputs = make(family, dtype, **sizes), images(dtype)
    apply_(model, FP8)
    run(model, inputs)
    recipe = static(model)
    restore_(model)
    return model, inputs, recipe


@pytest.fixture
def call():
    """One call of an attention module, by itself."""
    turns = torch.rand(124, 36)
    return {
        "hidden_states": torch.randn(124, 144),
        "cu_seqlens": torch.tensor([0, 96, 112, 124], dtype=torch.int32),
        "position_embeddings": tuple(x.repeat(1, 2) for x in (turns.cos(), turns.sin())),
        "max_seqlen": 96,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_as_unfused(family, monkeypatch):
    """In float32 the bits of the attention function, which rounds nothing before FP8 either."""
    model, inputs, recipe = calibrated(family)
    plain, expected = run_layers(model, inputs)
    changes = apply_(model, recipe)
    assert changes.fused == changes.layers and len(changes.fused["vision_attention"]) == 2
    fused, outputs = run_layers(model, inputs)
    # The first layer's inputs are the same; later ones see the errors of those before.
    assert 0 < relative_rms(outputs[0], expected[0]) < FP8_BUDGET
    restore_(model)
    assert_same_bits(run(model, inputs), plain)
    monkeypatch.setattr(fused_vision, "find_forward", lambda module: None)
    assert str(apply_(model, recipe)) == "vision_attention: 2 layers"
    assert_same_bits(run(model, inputs), fused)


def test_fused_in_bf16_rounds_once(monkeypatch):
    """The model rounds turned queries and keys to bf16 before FP8, which moves some by a step.

    A bf16 step is 1/16 of an e4m3 step, so 1 value in 64 lands on the other side of a bound and
    differs by a whole step: sqrt(12 / 64) = 0.43 of what FP8's own rounding does to the result.
    """
    model, inputs, recipe = calibrated("qwen3_vl", torch.bfloat16)
    _, (plain, _) = run_layers(model, inputs)
    apply_(model, recipe)
    _, (fused, _) = run_layers(model, inputs)
    restore_(model)
    monkeypatch.setattr(fused_vision, "find_forward", lambda module: None)
    apply_(model, recipe)
    _, (unfused, _) = run_layers(model, inputs)
    assert fused.dtype == torch.bfloat16
    distances = [relative_rms(x, plain) for x in (fused, unfused)]
    assert max(distances) < FP8_BUDGET and max(distances) < 1.1 * min(distances)
    assert 0 < relative_rms(fused, unfused) < 0.5 * min(distances)


def test_a_wrong_rotation_would_show(monkeypatch):
    model, inputs, recipe = calibrated("qwen3_vl")
    _, (plain, _) = run_layers(model, inputs)
    apply_(model, recipe)
    monkeypatch.setattr(fused_vision, "_rotary", lambda *args: None)
    _, (unturned, _) = run_layers(model, inputs)
    assert relative_rms(unturned, plain) > FP8_BUDGET


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_and_projections_go_as_they_lie(family, monkeypatch):
    """q, k and v are views of one projection, tables views of the model's, whose halves agree."""
    model, inputs = make(family), images()
    apply_(model, FP8)
    calls, tables = [], []
    forward = EncoderAttention.forward

    def record(self, q, k, v, **options):
        calls.append((q, k, v, options))
        return forward(self, q, k, v, **options)

    def record_tables(module, args, options):
        tables.append(options["position_embeddings"])

    monkeypatch.setattr(EncoderAttention, "forward", record)
    for block in model.blocks:
        block.attn.register_forward_pre_hook(record_tables, with_kwargs=True)
    run(model, inputs)
    assert len(calls) == len(tables) == 2
    for (q, k, v, options), given in zip(calls, tables, strict=True):
        assert q.shape == k.shape == v.shape == (124, 2, 72)
        assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == {q.data_ptr()}
        assert {x.stride() for x in (q, k, v)} == {(3 * 144, 72, 1)}
        rotary = options["rotary"]
        for table, full in zip((rotary.cos, rotary.sin), given, strict=True):
            assert table.data_ptr() == full.data_ptr() and table.shape == (124, 36)
            assert_same_bits(full[:, :36], full[:, 36:])
    lengths = [options["cu_seqlens"].diff() for *_, options in calls]
    assert [options["max_seqlen"] for *_, options in calls] == [int(x.max()) for x in lengths]
    # The first layer of Qwen2.5-VL attends in windows.
    assert len(lengths[0]) > 3 if family == "qwen2_5_vl" else len(lengths[0]) == 3
    assert len(lengths[1]) == 3


@pytest.mark.parametrize("scaling", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_one_op_of_each_kind_per_layer_and_no_wait(family, scaling, monkeypatch):
    """Whatever asks the device for a value is asked as often by two layers as by five."""
    is_inside, counts = [False], {}

    def counted(name, function):
        @functools.wraps(function)
        def count(*args, **options):
            if not is_inside[0]:
                counts[name] = counts.get(name, 0) + 1
            return function(*args, **options)

        return count

    def closed(function):
        @functools.wraps(function)
        def run_inside(*args, **options):
            is_inside[0] = True
            try:
                return function(*args, **options)
            finally:
                is_inside[0] = False

        return run_inside

    seen = []
    for depth in (2, 5):
        model, inputs, recipe = calibrated(family, depth=depth)
        apply_(model, FP8 if scaling == "dynamic" else recipe)
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
            for name in ("quantize_qkv", "attention"):
                patch.setattr(ops, name, counted(name, closed(getattr(ops, name))))
            counts.clear()
            run(model, inputs)
        assert counts.pop("quantize_qkv") == counts.pop("attention") == depth
        assert counts["tolist"] > 0  # the tower itself reads the grid: the count works
        seen.append(dict(counts))
    assert seen[0] == seen[1]


def test_nothing_waits_inside_a_module(call):
    """Fake tensors have no values: whatever reads one raises, in the checks of ops as well."""
    model = make("qwen3_vl")
    apply_(model, FP8)
    module = model.blocks[0].attn
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        fake = {k: mode.from_tensor(x) for k, x in call.items() if isinstance(x, torch.Tensor)}
        tables = tuple(mode.from_tensor(x) for x in call["position_embeddings"])
        out = module(**fake, position_embeddings=tables, max_seqlen=96)
        assert out.shape == (124, 144)
        with pytest.raises(Exception, match=r"aten\._local_scalar_dense"):
            fake["cu_seqlens"].max().item()


def test_without_a_longest_length_the_bound_is_all_tokens(call, monkeypatch):
    model = make("qwen3_vl")
    apply_(model, static_of_one(model))
    module, bounds = model.blocks[0].attn, []
    forward = EncoderAttention.forward

    def record(self, *args, **options):
        bounds.append(options["max_seqlen"])
        return forward(self, *args, **options)

    monkeypatch.setattr(EncoderAttention, "forward", record)
    with torch.inference_mode():
        expected = module(**call)
        call["cu_seqlens"] = call["cu_seqlens"].to(torch.int64)
        assert_same_bits(module(**{**call, "max_seqlen": None}), expected)
    assert bounds == [96, 124]


def static_of_one(model):
    scales = {name: {"q": 0.01, "k": 0.01, "v": 0.01} for name in vision.find_layers(model)}
    return Recipe(vision_attention={"scaling": "static"}, scales=scales)


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_to_the_class_itself(family):
    model = make(family)
    before = [dict(vars(block.attn)) for block in model.blocks]
    signature = inspect.signature(model.blocks[0].attn.forward)
    apply_(model, FP8)
    for block in model.blocks:
        assert list(inspect.signature(block.attn.forward).parameters) == list(signature.parameters)
        assert type(block.attn).__name__ in vision.PACKED
    restore_(model)
    for block, attributes in zip(model.blocks, before, strict=True):
        assert vars(block.attn) == attributes and "forward" not in attributes
        assert block.attn.forward.__func__ is type(block.attn).forward


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_by_itself(duplicate):
    model, inputs = make("qwen3_vl"), images()
    apply_(model, FP8)
    expected = run(model, inputs)
    twin = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_bits(run(twin, inputs), expected)
    assert [int(layer.scaling.num_passes) for layer in layers_of(twin)] == [2, 2]
    assert [int(layer.scaling.num_passes) for layer in layers_of(model)] == [1, 1]
    restore_(twin)
    assert not vision.find_fused(twin) and len(vision.find_fused(model)) == 2


def test_state_dict_round_trip():
    model, inputs = make("qwen3_vl"), images()
    apply_(model, FP8)
    for num_passes in (1, 2, 3):
        expected = run(model, inputs)
        assert {int(layer.scaling.num_passes) for layer in layers_of(model)} == {num_passes}
    torch.manual_seed(1)
    other = make("qwen3_vl")
    apply_(other, FP8)
    other.load_state_dict(model.state_dict())
    assert {int(layer.scaling.num_passes) for layer in layers_of(other)} == {3}
    assert_same_bits(run(other, inputs), expected)


def test_compiled_without_a_break(call):
    model = make("qwen3_vl")
    apply_(model, FP8)
    module = model.blocks[0].attn
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert_same_bits(compiled(**call), module(**call))
    assert int(layers_of(model)[0].scaling.num_passes) == 2


def test_skipped_layers_keep_their_forward():
    model, inputs = make("qwen3_vl"), images()
    plain, expected = run_layers(model, inputs)
    changes = apply_(model, Recipe(vision_attention="fp8", skip_layers=["0"]))
    assert changes.fused["vision_attention"] == ["blocks.1.attn"]
    skipped = model.blocks[0].attn
    assert "forward" not in vars(skipped)
    _, (first, second) = run_layers(model, inputs)
    assert relative_rms(first, expected[0]) < 1e-5
    assert 1e-3 < relative_rms(second, expected[1]) < FP8_BUDGET
    restore_(model)
    assert_same_bits(run(model, inputs), plain)


def test_static_scales_by_the_names_of_vllm():
    model, inputs, recipe = calibrated("qwen3_vl")
    holder = torch.nn.Module()
    holder.visual = model
    names = [f"visual.blocks.{i}.attn" for i in (0, 1)]
    assert list(recipe.scales) == [f"{name}.attn" for name in names]
    changes = apply_(holder, recipe)
    assert changes.layers == changes.fused == {"vision_attention": names}
    assert [float(layer.scaling.q) for layer in layers_of(model)] == pytest.approx(
        [scale["q"] for scale in recipe.scales.values()]
    )
    out = run(model, inputs)
    restore_(holder)
    apply_(model, recipe)
    assert_same_bits(run(model, inputs), out)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention_mask": torch.ones(1)}, UnsupportedError, "got attention_mask"),
        ({"softcap": 2.0, "s_aux": torch.ones(2)}, UnsupportedError, "got s_aux, softcap"),
        ({"cu_seq_lens_q": torch.zeros(2)}, UnsupportedError, "got cu_seq_lens_q"),
        ({"position_embeddings": None}, ConfigError, "expected position_embeddings, got none"),
        (
            {"position_embeddings": (torch.ones(124, 36), torch.ones(124, 36))},
            ConfigError,
            r"of shape \[124, 72\], got \[124, 36\] and \[124, 36\]",
        ),
    ],
)
def test_calls_that_are_refused(options, error, message, call):
    model = make("qwen3_vl")
    apply_(model, FP8)
    with pytest.raises(error, match=message):
        model.blocks[0].attn(**{**call, **options})
    assert int(layers_of(model)[0].scaling.num_passes) == 0


def test_what_only_passes_through_is_let_through(call):
    model = make("qwen3_vl")
    apply_(model, static_of_one(model))
    module = model.blocks[0].attn
    with torch.inference_mode():
        expected = module(**call)
        flags = {"use_cache": True, "output_hidden_states": True, "attention_mask": None}
        assert_same_bits(module(**call, **flags), expected)


def test_dropout_and_another_scaling_are_refused(call):
    model = make("glm4v", attention_dropout=0.1)
    apply_(model, FP8)
    module = model.blocks[0].attn
    with torch.inference_mode():
        module(**call)
        module.train()
        with pytest.raises(UnsupportedError, match="for inference, got dropout 0.1"):
            module(**call)
        module.eval().scaling = 0.5
        with pytest.raises(UnsupportedError, match=r"expected scaling 0.117.*, got 0.5"):
            module(**call)


def test_another_attention_in_the_config_is_refused():
    """A fused forward asks no registry: it would go on in FP8 whatever the config says."""
    model = make("qwen3_vl")
    apply_(model, FP8)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="got 'eager': restore_ the model first"):
        model(**images())
    model.config._attn_implementation = before
    model(**images())
    restore_(model)
    model.set_attn_implementation("eager")
    model(**images())


def test_no_image_at_all():
    model = make("qwen3_vl")
    apply_(model, static_of_one(model))
    empty = {
        "hidden_states": torch.zeros(0, 144),
        "cu_seqlens": torch.tensor([0], dtype=torch.int32),
        "position_embeddings": (torch.zeros(0, 72), torch.zeros(0, 72)),
        "max_seqlen": 0,
    }
    with torch.inference_mode():
        assert model.blocks[0].attn(**empty).shape == (0, 144)


def _subclass(kind):
    """A class of the same name with a forward of its own."""

    def forward(self, *args, **options):
        return 2 * kind.forward(self, *args, **options)

    return type(kind.__name__, (kind,), {"forward": forward})


def _wrapped(kind):
    """A class whose forward is a decorated one."""

    @functools.wraps(kind.forward)
    def forward(self, *args, **options):
        return 2 * kind.forward(self, *args, **options)

    return type(kind.__name__, (kind,), {"forward": forward})


@pytest.mark.parametrize("change", [_subclass, _wrapped])
def test_another_forward_is_kept(change):
    """FP8 comes by the attention function there, and what the class adds is not lost."""
    model, inputs, recipe = calibrated("qwen3_vl")
    for block in model.blocks:
        block.attn.__class__ = change(type(block.attn))
    _, expected = run_layers(model, inputs)
    changes = apply_(model, recipe)
    assert str(changes) == "vision_attention: 2 layers" and not vision.find_fused(model)
    _, outputs = run_layers(model, inputs)
    assert 0 < relative_rms(outputs[0], expected[0]) < FP8_BUDGET
    restore_(model)


def test_modules_with_more_in_them_are_not_fused():
    model = make("qwen3_vl")
    first, second = (block.attn for block in model.blocks)
    first.q_norm = torch.nn.LayerNorm(72)
    second.forward = lambda *args, **options: type(second).forward(second, *args, **options)
    assert fused_vision.find_forward(first) is None
    assert fused_vision.find_forward(second) is None
    kept = second.forward
    apply_(model, FP8)
    run(model, images())
    restore_(model)
    assert second.forward is kept


def test_a_forward_replaced_since_is_not_lost():
    model, inputs = make("qwen3_vl"), images()
    apply_(model, FP8)
    module = model.blocks[1].attn
    ours = module.forward
    module.forward = lambda *args, **options: ours(*args, **options)
    with pytest.raises(ConfigError, match=r"blocks\.1\.attn: expected the forward that octavo put"):
        restore_(model)
    assert len(layers_of(model)) == 2
    run(model, inputs)
    module.forward = ours
    restore_(model)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_fused_tower_on_a_gpu(family, scaling):
    """bf16 on the GPU against the same tower there without FP8; nothing waits in a module."""
    model, inputs, recipe = calibrated(family, torch.bfloat16)
    model.cuda()
    inputs = {name: x.cuda() for name, x in inputs.items()}
    _, (expected, _) = run_layers(model, inputs)
    apply_(model, FP8 if scaling == "dynamic" else recipe)
    _, (out, _) = run_layers(model, inputs)
    assert 0 < relative_rms(out.float().cpu(), expected.float().cpu()) < FP8_BUDGET
    module = model.blocks[1].attn
    turns = torch.rand(124, 36, device="cuda").repeat(1, 2)
    call = {
        "hidden_states": torch.randn(124, 144, device="cuda", dtype=torch.bfloat16),
        "cu_seqlens": torch.tensor([0, 96, 112, 124], dtype=torch.int32, device="cuda"),
        "position_embeddings": (turns.cos(), turns.sin()),
        "max_seqlen": 96,
    }
    with torch.inference_mode():
        module(**call)
        with assert_no_waiting():
            module(**call)
