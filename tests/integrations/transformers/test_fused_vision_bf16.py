"""Vision towers in BF16 by the path that FP8 takes: the same swap, and nothing is quantized."""

import copy
import pickle

import pytest
import torch

from octavo import ConfigError, Recipe, UnsupportedError, ops
from octavo.calibration.autosave import ScaleSaver
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import fused_vision
from octavo.integrations.transformers.calibrate import observe_images
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("transformers")

import transformers

from octavo_testkit.models.vision_towers import FAMILIES, images, layers_of, make, run, run_layers

BF16 = Recipe(vision_attention="bf16")
# Of one layer's output against stock: what the benchmark of whole towers allows BF16.
BF16_BUDGET = 0.01


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every op that layers call, by name."""
    found = {name: [] for name in ("rotate_qk", "quantize_qkv", "attention")}

    def recorded(name, function):
        def record(*args, **options):
            found[name].append(args)
            return function(*args, **options)

        return record

    for name in found:
        monkeypatch.setattr(ops, name, recorded(name, getattr(ops, name)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_as_unfused(family, dtype, monkeypatch):
    """The bits of the model's own rotation, which turns in float32 and rounds once as well."""
    model, inputs = make(family, dtype), images(dtype)
    keys = list(model.state_dict())
    plain, expected = run_layers(model, inputs)
    changes = apply_(model, BF16)
    assert str(changes) == "vision_attention: 2 layers, 2 of them fused"
    assert list(model.state_dict()) == keys  # it has no scales to save
    fused, outputs = run_layers(model, inputs)
    assert outputs[0].dtype == dtype
    assert relative_rms(outputs[0], expected[0]) < BF16_BUDGET
    assert restore_(model).layers == changes.layers
    assert_same_bits(run(model, inputs), plain)
    monkeypatch.setattr(fused_vision, "find_forward", lambda module: None)
    assert str(apply_(model, BF16)) == "vision_attention: 2 layers"
    assert_same_bits(run(model, inputs), fused)


def test_a_wrong_rotation_would_show(monkeypatch):
    model, inputs = make("qwen3_vl", torch.bfloat16), images(torch.bfloat16)
    _, (plain, _) = run_layers(model, inputs)
    apply_(model, BF16)
    monkeypatch.setattr(fused_vision, "_rotary", lambda *args: None)
    _, (unturned, _) = run_layers(model, inputs)
    assert relative_rms(unturned, plain) > BF16_BUDGET


def test_one_op_of_each_kind_per_layer(calls):
    """All images in one call; queries and keys are turned, values go as they lie."""
    model = make("qwen3_vl", torch.bfloat16)
    apply_(model, BF16)
    run(model, images(torch.bfloat16))
    assert {name: len(found) for name, found in calls.items()} == {
        "rotate_qk": 2,
        "quantize_qkv": 0,
        "attention": 2,
    }
    for (q, k, _), (turned_q, turned_k, v, _) in zip(
        calls["rotate_qk"], calls["attention"], strict=True
    ):
        assert {x.stride() for x in (q, k, v)} == {(3 * 144, 72, 1)}
        assert {x.untyped_storage().data_ptr() for x in (q, k, v)} == {q.data_ptr()}
        assert turned_q.is_contiguous() and turned_k.is_contiguous()


def test_another_attention_by_name():
    """A registered implementation runs for every layer that asks for it, or raises."""
    model, inputs = make("qwen3_vl", torch.bfloat16), images(torch.bfloat16)
    apply_(model, BF16)
    expected, seen = run(model, inputs), []

    def attend(q, k, v, spec, scales, **options):
        seen.append(q.shape)
        out = ops.attention(q, k, v, spec, packing=options["packing"], impl="reference")
        return out, q.new_empty(0, dtype=torch.float32)

    ops.register_impl("attention", "mine", attend)
    try:
        for layer in layers_of(model):
            layer.impl = "mine"
        assert_same_bits(run(model, inputs), expected)
        assert seen == [(124, 2, 72)] * 2
    finally:
        ops.unregister_impl("attention", "mine")
    with pytest.raises(ConfigError, match="impl for attention, .*; got 'mine'"):
        run(model, inputs)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_runs_by_itself(duplicate):
    model, inputs = make("qwen3_vl", torch.bfloat16), images(torch.bfloat16)
    apply_(model, BF16)
    expected, twin = run(model, inputs), duplicate(model)
    assert_same_bits(run(twin, inputs), expected)
    restore_(twin)
    assert not layers_of(twin) and len(layers_of(model)) == 2


def test_compiled_without_a_break():
    model = make("qwen3_vl", torch.bfloat16)
    apply_(model, BF16)
    module = model.blocks[0].attn
    turns = torch.rand(124, 36)
    call = {
        "hidden_states": torch.randn(124, 144).bfloat16(),
        "cu_seqlens": torch.tensor([0, 96, 112, 124], dtype=torch.int32),
        "position_embeddings": tuple(x.repeat(1, 2) for x in (turns.cos(), turns.sin())),
        "max_seqlen": 96,
    }
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert_same_bits(compiled(**call), module(**call))


def test_a_tower_without_rotary_embedding(calls):
    sizes = {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.SiglipVisionConfig(
        **sizes, num_hidden_layers=2, image_size=32, patch_size=8
    )
    torch.manual_seed(0)
    model = transformers.SiglipVisionModel(config).eval().bfloat16()
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32).bfloat16()}
    plain = run(model, pixels)
    assert str(apply_(model, BF16)) == "vision_attention: 2 layers"
    assert relative_rms(run(model, pixels), plain) < BF16_BUDGET
    assert [len(calls[name]) for name in ("rotate_qk", "attention")] == [0, 2]
    restore_(model)
    assert_same_bits(run(model, pixels), plain)


def test_whisper(calls):
    sizes = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = transformers.WhisperConfig(
        **sizes, encoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20, decoder_layers=1
    )
    torch.manual_seed(0)
    model = transformers.models.whisper.modeling_whisper.WhisperEncoder(config).eval().bfloat16()
    sound = {"input_features": torch.randn(1, 8, 40).bfloat16()}
    plain = run(model, sound)
    assert str(apply_(model, BF16)) == "vision_attention: 2 layers, 2 of them fused"
    assert relative_rms(run(model, sound), plain) < BF16_BUDGET
    assert len(calls["attention"]) == 2
    assert len(restore_(model).layers["vision_attention"]) == 2


def test_what_is_refused(tmp_path):
    model = make("qwen3_vl")
    with pytest.raises(UnsupportedError, match=r"bfloat16 or float16 .*, got torch\.float32"):
        apply_(model, BF16)
    assert not layers_of(model)
    model = model.bfloat16()
    apply_(model, BF16)
    with pytest.raises(ConfigError, match="restore_ it first"):
        apply_(model, Recipe(vision_attention="fp8"))
    with (
        pytest.raises(ConfigError, match="got one that apply_ changed: restore_ it first"),
        observe_images(model, lambda *_: None),
    ):
        pass
    with pytest.raises(ConfigError, match="attention in fp8 whose scales can be saved"):
        ScaleSaver(model, tmp_path / "scales.json")


def test_a_layer_turns_in_its_own_dtype():
    """A layer without scales has the bits of rotate_qk and attention, one after the other."""
    from octavo.numerics.rotary import Rotary

    q, k, v = torch.randn(3, 40, 2, 72).bfloat16()
    angle = torch.rand(40, 36)
    rotary = Rotary(angle.cos(), angle.sin())
    packed = {"cu_seqlens": torch.tensor([0, 1, 40], dtype=torch.int32), "max_seqlen": 39}
    out = EncoderAttention(2, 72)(q, k, v, **packed, rotary=rotary)
    turned = ops.rotate_qk(q, k, rotary)
    assert_same_bits(out, EncoderAttention(2, 72)(*turned, v, **packed))
