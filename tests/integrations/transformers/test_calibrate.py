"""Calibrating transformers' vision towers: observed, resumed, saved, and used as static scales."""

from dataclasses import replace

import pytest
import torch

from octavo import (
    CalibrationSettings,
    CheckpointError,
    ConfigError,
    Recipe,
    UnsupportedError,
    calibrate,
    load_scales,
    save_scales,
)
from octavo.calibration import run as run_module
from octavo.calibration.data import open_images
from octavo.calibration.run import calibrate_to_file
from octavo.calibration.scale_file import ScaleHeader
from octavo.calibration.state import state_path
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers.calibrate import layer_names, observe_images
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.amax import HISTORY_LENGTH
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits

pytest.importorskip("transformers")
pytest.importorskip("PIL")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from octavo.integrations.transformers import calibrate as calibrate_module
from octavo.integrations.transformers.calibrate import (
    ImageModel,
    autosave,
    encode,
    load_image_model,
)
from octavo.integrations.transformers.vision import find_layers
from octavo_testkit.models import image_models

STATIC = {"scaling": "static"}


def inputs_of(num_images, seed=0):
    images = image_models.make_images(num_images, seed)
    return dict(image_models.make_processor()(images=images, return_tensors="pt"))


@torch.inference_mode()
def features(model, inputs):
    found = encode(model, inputs).pooler_output
    return torch.cat(list(found)) if isinstance(found, list | tuple) else found


def state_of(model):
    implementation = model.config.vision_config._attn_implementation
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    return implementation, attributes, list(model.state_dict())


def test_observing_changes_nothing_but_sees_everything():
    model, inputs = image_models.make_model(), inputs_of(3)
    expected, before = features(model, inputs), state_of(model)
    seen = []
    with observe_images(model, lambda name, q, k, v: seen.append((name, q, k, v))):
        found = features(model, inputs)
    assert relative_rms(found, expected) < 0.01  # BF16, by another attention function
    assert [name for name, *_ in seen] == layer_names(model) == image_models.LAYERS
    num_tokens = int(inputs["image_grid_thw"].prod(dim=1).sum())
    for _, *qkv in seen:
        assert [list(x.shape) for x in qkv] == [[1, num_tokens, 2, 72]] * 3
    assert state_of(model) == before
    assert_same_bits(features(model, inputs), expected)


def test_queries_and_keys_are_seen_after_rotation():
    """What FP8 attention would push into its history, to the rounding of BF16."""
    model, inputs = image_models.make_model(), inputs_of(2)
    amax = {}

    def see(name, *qkv):
        amax[name] = [float(x.abs().max()) for x in qkv]

    with observe_images(model, see):
        features(model, inputs)
    apply_(model, Recipe(vision_attention="fp8"))
    features(model, inputs)
    layer = next(m for m in model.modules() if isinstance(m, EncoderAttention))
    history = layer.scaling
    pushed = [float(part.amax()) for part in (history.q, history.k, history.v)]
    assert amax[image_models.LAYERS[0]] == pytest.approx(pushed, rel=2**-7)


def test_an_error_leaves_the_model_as_it_was():
    model, inputs = image_models.make_model(), inputs_of(1)
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), observe_images(model, lambda *_: 1 / 0):
        features(model, inputs)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "cu_seq_lens_q and max_length_q"),
        ({"softcap": 30.0}, "got softcap"),
        ({"cu_seq_lens_k": torch.zeros(2)}, "two cu_seq_lens"),
    ],
)
def test_a_call_that_attends_otherwise_is_not_observed(options, reason):
    model = image_models.make_model()
    seen = []
    module = next(iter(find_layers(model).values()))
    x = torch.zeros(1, module.num_heads, 4, module.head_dim)
    with observe_images(model, lambda *args: seen.append(args)):
        attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        with pytest.raises(UnsupportedError, match=reason):
            attend(module, x, x, x, None, scaling=module.scaling, is_causal=False, **options)
    assert not seen


def test_a_model_in_fp8_is_refused():
    model = image_models.make_model()
    apply_(model, Recipe(vision_attention="fp8"))
    with pytest.raises(ConfigError, match="got one that apply_ changed: restore_ it first"):
        calibrate(model, [inputs_of(1)])


def test_a_model_without_a_vision_tower_is_refused():
    with pytest.raises(UnsupportedError, match="expected a vision tower"):
        calibrate(torch.nn.Linear(2, 2), [])


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("observer", ["amax", "percentile", "mse"])
def test_calibrated_scales_reproduce_bf16(observer, granularity):
    model, inputs = image_models.make_model(), inputs_of(2, seed=1)
    expected = features(model, inputs)
    settings = CalibrationSettings(observer=observer, granularity=granularity)
    scales = calibrate(model, [inputs_of(2), inputs_of(1, seed=2)], settings)
    assert list(scales.layers) == image_models.LAYERS
    recipe = Recipe(
        vision_attention={**STATIC, "granularity": granularity},
        scales=scales.to_dict()["layers"],
    )
    apply_(model, recipe)
    assert 0 < relative_rms(features(model, inputs), expected) < 0.05


@pytest.fixture
def images(tmp_path):
    return open_images(str(image_models.write_images(tmp_path / "images", 7)))


def image_model():
    return ImageModel("tiny", image_models.make_model(), image_models.make_processor())


def test_resuming_after_an_interrupt(tmp_path, images, monkeypatch):
    settings = CalibrationSettings(observer="percentile", percentile=99, granularity="head")
    expected = calibrate_to_file(image_model().subject(), images, tmp_path / "a.json", settings)
    path = tmp_path / "b.json"
    num_calls = 0

    def fail_at_the_sixth(model, inputs):
        nonlocal num_calls
        num_calls += 1
        result = encode(model, inputs)
        if num_calls == 6:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(calibrate_module, "encode", fail_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_file(image_model().subject(), images, path, settings, save_every=2)
    assert state_path(path).exists() and not path.exists()
    seen = []
    found = calibrate_to_file(
        image_model().subject(), images, path, settings, save_every=2, on_prompts=seen.append
    )
    assert seen == [4, 5, 6, 7]
    assert found.scales.layers == expected.scales.layers == load_scales(path).layers
    assert found.statistics == expected.statistics
    assert not state_path(path).exists()


def test_another_request_does_not_resume(tmp_path, images, monkeypatch):
    path = tmp_path / "s.json"
    save = run_module.save_scales
    monkeypatch.setattr(run_module, "save_scales", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate_to_file(
            image_model().subject(), images, path, CalibrationSettings(), save_every=1
        )
    monkeypatch.setattr(run_module, "save_scales", save)
    other = CalibrationSettings(margin=2.0)
    with pytest.raises(ConfigError, match=r"expected margin 2, got 1\.5; start afresh"):
        calibrate_to_file(image_model().subject(), images, path, other)
    with pytest.raises(ConfigError, match="has seen 7 prompts: expected as many or more, got 3"):
        calibrate_to_file(
            image_model().subject(), images, path, CalibrationSettings(), num_prompts=3
        )
    found = calibrate_to_file(
        image_model().subject(), images, path, other, is_resumed=False, num_prompts=3
    )
    assert found.num_prompts == 3


def test_the_batch_size_changes_no_scale(tmp_path, images):
    settings = CalibrationSettings()
    one = calibrate_to_file(image_model().subject(), images, tmp_path / "a.json", settings)
    many = calibrate_to_file(
        image_model().subject(), images, tmp_path / "b.json", settings, batch_size=3
    )
    assert (one.scales.header.passes, many.scales.header.passes) == (7, 3)
    for name, layer in one.scales.layers.items():
        assert many.scales.layer(name).q == pytest.approx(layer.q, rel=0.02)  # BF16 sums


def test_a_layer_of_zeros_saves_nothing(tmp_path, images):
    broken = image_model()
    with torch.no_grad():
        qkv = broken.model.model.visual.blocks[1].attn.qkv
        qkv.weight.zero_()
        qkv.bias.zero_()
    path = tmp_path / "s.json"
    with pytest.raises(ConfigError, match=r"layer visual\.blocks\.1\.attn\.attn: q: .* only zeros"):
        calibrate_to_file(broken.subject(), images, path, CalibrationSettings())
    assert not path.exists()


def test_a_dynamic_run_is_saved_and_loaded_as_static(tmp_path):
    """vLLM's two steps: the first run saves, the next one loads."""
    model, path = image_models.make_model(), tmp_path / "s.json"
    inputs = inputs_of(2, seed=5)
    expected = features(model, inputs)
    apply_(model, Recipe(vision_attention="fp8"))
    saver = autosave(model, path, model_name="tiny")
    for seed in range(HISTORY_LENGTH):
        assert not path.exists()
        features(model, inputs_of(1, seed=seed))
    assert path.exists()
    saver.close()
    restore_(model)
    scales = load_scales(path)
    assert list(scales.layers) == image_models.LAYERS
    assert (scales.header.model, scales.header.margin) == ("tiny", 1.5)
    apply_(model, Recipe(vision_attention=STATIC, scales=str(path)))
    assert 0 < relative_rms(features(model, inputs), expected) < 0.05


def test_the_scales_of_a_kv_cache_are_refused(tmp_path):
    model, path = image_models.make_model(), tmp_path / "s.json"
    scales = calibrate(model, [inputs_of(1)])
    assert scales.header.kind == "vision_attention"
    save_scales(path, replace(scales, header=ScaleHeader(kind="kv_cache")))
    with pytest.raises(CheckpointError, match="expected scales for vision_attention, got a file"):
        apply_(model, Recipe(vision_attention=STATIC, scales=str(path)))


def test_a_folder_without_a_processor(tmp_path):
    image_models.make_model().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="expected an image processor"):
        load_image_model(str(tmp_path))


def test_weights_that_are_missing(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = image_models.write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (gone,) = [name for name in tensors if "blocks.1.attn.qkv.weight" in name]
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"got none for 'model\.visual\.blocks\.1\.attn\.qkv"):
        load_image_model(str(folder))


@pytest.mark.parametrize(
    ("choice", "error"),
    [({"dtype": "int8"}, ConfigError), ({"device": "abacus"}, UnsupportedError)],
)
def test_a_dtype_or_device_that_does_not_exist(tmp_path, choice, error):
    with pytest.raises(error, match="got '(int8|abacus)'"):
        load_image_model(str(tmp_path), **choice)
