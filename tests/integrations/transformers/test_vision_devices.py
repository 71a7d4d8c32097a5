"""Vision towers on devices that FP8 attention cannot run on: apply_ says so."""

import pytest
import torch

from octavo import ConfigError, Recipe, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.transformers.encoder_options import EncoderOptions
from octavo.integrations.transformers.vision_tower import make_pixels, make_tower
from octavo.kernels.device import Device
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.error import relative_rms
from octavo.ops import check
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("transformers")

FP8 = Recipe(vision_attention="fp8")
A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)
L40 = Device(type="cuda", name="NVIDIA L40", capability=(8, 9), num_sms=142)


def tower():
    return make_tower("tiny", torch.device("cpu")).module


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, EncoderAttention)]


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = tower()
    message = r"blocks\.0\.attn: expected a GPU with FP8 .* got NVIDIA A100 \(sm_80\)"
    with pytest.raises(UnsupportedError, match=message):
        apply_(model, FP8)
    with pytest.raises(UnsupportedError, match="A100"):
        EncoderOptions(attn_dtype="fp8").apply(model)
    assert not layers_of(model)
    # Attention in the model's own dtype needs none.
    apply_(model, Recipe(vision_attention="bf16"))


def test_the_reference_by_name_runs_there(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = tower()
    apply_(model, FP8, vision_impl="reference")
    assert {layer.impl for layer in layers_of(model)} == {"reference"}
    with torch.no_grad():
        assert model(**make_pixels(model, [(128, 128)])).pooler_output.isfinite().all()
    EncoderOptions(attn_dtype="fp8", attn_backend="reference").apply(tower())


def test_a_gpu_with_fp8_is_not_refused(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: L40)
    assert len(apply_(tower(), FP8).layers["vision_attention"]) == 2


def test_a_tower_that_moves_to_such_a_gpu_raises_at_its_first_call(monkeypatch):
    model = tower()
    apply_(model, FP8)
    monkeypatch.setattr(check, "describe", lambda device: A100)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attn: expected a GPU with FP8"):
        model(**make_pixels(model, [(128, 128)]))


def test_an_impl_needs_its_field_and_its_name():
    with pytest.raises(ConfigError, match="one of gluon, triton, reference; got 'fastest'"):
        apply_(tower(), FP8, vision_impl="fastest")
    with pytest.raises(ConfigError, match="expected vision_attention for impl 'triton'"):
        apply_(tower(), Recipe(kv_cache="fp8"), vision_impl="triton")


def test_offloaded_weights_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = tower()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attn: .* on meta.*apply_ first, then"):
        apply_(model, FP8)
    assert not layers_of(model)


def test_a_tower_may_be_offloaded_after():
    accelerate = pytest.importorskip("accelerate")
    model, other = tower(), tower()
    pixels = make_pixels(model, [(128, 128)])
    apply_(model, FP8)
    apply_(other, FP8)
    accelerate.cpu_offload(other, execution_device=torch.device("cpu"))
    with torch.no_grad():
        assert_same_bits(other(**pixels).pooler_output, model(**pixels).pooler_output)


def test_a_module_with_hooks_keeps_them_and_gets_fp8():
    hooks = pytest.importorskip("accelerate.hooks")
    model, stock = tower(), tower()
    pixels = make_pixels(model, [(128, 128)])
    hooks.add_hook_to_module(model.blocks[0].attn, hooks.AlignDevicesHook("cpu"))
    changes = apply_(model, FP8)
    assert changes.fused == {"vision_attention": ["blocks.1.attn"]}
    assert changes.layers == {"vision_attention": ["blocks.0.attn", "blocks.1.attn"]}
    with torch.no_grad():
        error = relative_rms(model(**pixels).pooler_output, stock(**pixels).pooler_output)
    assert 0 < error < 0.05
    assert [int(layer.scaling.num_passes) for layer in layers_of(model)] == [1, 1]


def test_a_tower_that_slept_is_as_before():
    """Memory that was discarded; a state dict taken after apply_, and the model's own buffers."""
    model = tower()
    pixels = make_pixels(model, [(128, 128)])
    checkpoint = {name: x.clone() for name, x in model.state_dict().items()}
    apply_(model, FP8)
    with torch.no_grad():
        model(**pixels)
        buffers = {name: x.clone() for name, x in model.named_buffers()}
        state = {name: x.clone() for name, x in model.state_dict().items()}
        expected = model(**pixels).pooler_output

        def wake(weights, kept):
            model.to_empty(device="cpu")
            loaded = model.load_state_dict(weights, strict=False)
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(buffers[name])
            return loaded.missing_keys

        # Rotary tables of transformers are in no state dict.
        own = buffers.keys() - state.keys()
        assert wake(state, kept=own) == []
        assert_same_bits(model(**pixels).pooler_output, expected)
        # The model's own checkpoint has no scales: all buffers were kept.
        missing = wake(checkpoint, kept=buffers.keys())
        assert missing and all(".scaling." in name for name in missing)
        assert_same_bits(model(**pixels).pooler_output, expected)
