"""Modulation and other layers with FP8 weights alone: the word, what it overrules, and files."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import PipelineQuantizationConfig

from octavo import (
    CheckpointError,
    ConfigError,
    Recipe,
    apply_,
    calibrate_pipeline,
    scan_sensitivity,
)
from octavo.integrations.diffusers import OctavoDiffusersConfig
from octavo.integrations.diffusers.pipeline import make_recipe
from octavo.integrations.diffusers.sensitivity import Scan, Sensitivity, SensitivityRow
from octavo.layers.linear import Fp8Linear
from octavo.recipe import LinearSettings
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, load_pipeline, run_pipeline

ALONE = LinearSettings(activation=None)
RECIPE = Recipe(linear="fp8", weight_only_layers=["modulation"])
NUM_MODULATION = {
    "flux": 3,
    "qwen_image": 4,
    "z_image": 3,
    "flux2_klein": 3,
    "hunyuan_video": 2,
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def settings_of(module):
    return {name: m.settings for name, m in module.named_modules() if isinstance(m, Fp8Linear)}


def weight_only(module):
    return [name for name, settings in settings_of(module).items() if settings.activation is None]


def assert_same_layers(actual, expected):
    before, after = expected.state_dict(), actual.state_dict()
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert_same_bits(after[name], x)
    assert settings_of(actual) == settings_of(expected)


@pytest.mark.parametrize("family", few("flux", "qwen_image"))
def test_modulation_is_one_word(family, folder_of, tmp_path):
    pipe, without = load_pipeline(folder_of(family)), load_pipeline(folder_of(family))
    if family not in NUM_MODULATION:
        with pytest.raises(ConfigError, match="none of them is modulation.*the layers are "):
            apply_(pipe, RECIPE)
        return
    changes = apply_(pipe, RECIPE)
    fewer = apply_(without, Recipe(linear="fp8"))
    found = changes.weight_only["transformer.linear"]
    kept = {n for n, reason in fewer.left["transformer.linear"].items() if "modulation" in reason}
    assert set(found) == kept and len(kept) == NUM_MODULATION[family]
    assert weight_only(pipe.transformer) == found
    assert {settings_of(pipe.transformer)[name] for name in found} == {ALONE}
    assert f", {len(found)} of them weight-only" in str(changes)
    others = {n: s for n, s in settings_of(pipe.transformer).items() if n not in found}
    assert others == settings_of(without.transformer)
    result = run_pipeline(pipe, family)
    assert result.isfinite().all()
    pipe.save_pretrained(tmp_path)
    again = load_pipeline(tmp_path)
    assert_same_layers(again.transformer, pipe.transformer)
    assert_same_bits(run_pipeline(again, family), result)


@pytest.fixture
def flux(folder_of):
    return load_pipeline(folder_of("flux"))


def test_while_loading(flux, folder_of, tmp_path):
    config = OctavoDiffusersConfig("fp8", weight_only_layers=["modulation"])
    mapping = PipelineQuantizationConfig(quant_mapping={"transformer": config})
    pipe = load_pipeline(folder_of("flux"), quantization_config=mapping)
    apply_(flux, RECIPE)
    assert_same_layers(pipe.transformer, flux.transformer)
    pipe.transformer.save_pretrained(tmp_path)
    kind = type(pipe.transformer)
    again = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same_layers(again, flux.transformer)
    assert again.config["quantization_config"].to_dict() == config.to_dict()
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["quantization_config"]["weight_only_layers"] = ["img_mod"]
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="of the saved config: pattern 'img_mod' matches"):
        kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert "weight_only_layers" not in OctavoDiffusersConfig().to_dict()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["time_text_embed"], "time and guidance embedding: every block depends on it"),
        (["modulation", "re:^proj_out$"], "proj_out stays as it is (an output projection: its"),
        (["x_embedder"], "x_embedder stays as it is (an input projection"),
        (["img_mlp"], "pattern 'img_mlp' matches none"),
    ],
)
def test_what_has_to_stay_is_refused(flux, patterns, said):
    with pytest.raises(ConfigError) as caught:
        apply_(flux, Recipe(linear="fp8", weight_only_layers=patterns))
    assert said in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # a transformer alone as well
        apply_(flux.transformer, Recipe(linear="fp8", weight_only_layers=patterns))
    assert said in str(caught.value)
    assert not settings_of(flux.transformer)


def test_both_lists(flux):
    recipe = RECIPE.replace(ignored_layers=["norm1"])
    with pytest.raises(ConfigError, match="in both: .transformer_blocks.0.norm1.linear"):
        apply_(flux, recipe)
    recipe = Recipe(linear="fp8", ignored_layers=["modulation"])  # stays, as it would anyway
    left = apply_(flux, recipe).left["transformer.linear"]
    assert left["transformer_blocks.0.norm1.linear"] == "ignored_layers"


def test_what_stays_by_default_alone_is_overruled(folder_of):
    pipe = load_pipeline(folder_of("qwen_image"))
    changes = apply_(pipe.transformer, Recipe(linear="fp8", weight_only_layers=["img_mlp"]))
    assert len(changes.weight_only["linear"]) == 4
    assert all(".img_mlp." in name for name in weight_only(pipe.transformer))


def test_components_share_the_word(flux):
    recipe = RECIPE.replace(text_encoder="fp8")
    changes = apply_(flux, recipe)
    assert list(changes.weight_only) == ["transformer.linear"]
    assert not weight_only(flux.text_encoder_2)


def test_vllms_words():
    words = {"method": "fp8", "weight_only_layers": ["modulation"]}
    assert make_recipe(words, ["transformer"]) == RECIPE
    by_component = make_recipe({"transformer": words}, ["transformer", "vae"])
    assert by_component.for_component("transformer") == RECIPE


def test_calibration_leaves_them_alone(flux):
    call = {"num_inference_steps": 1, "call_options": FAMILIES["flux"].call}
    scales = calibrate_pipeline(flux, ["a cat"], weight_only_layers=["modulation", "ff"], **call)
    assert not any(".ff." in name or "norm" in name for name in scales.inputs)
    with pytest.raises(ConfigError, match="expected weight_only_layers in the recipe"):
        calibrate_pipeline(flux, ["a cat"], recipe=RECIPE, weight_only_layers=["ff"], **call)
    static = {"linear": {"scaling": "static"}, "scales": scales.to_dict()}
    apply_(flux, Recipe(**static, weight_only_layers=["modulation", "ff"]))
    ff = flux.transformer.get_submodule("transformer_blocks.0.ff.net.2")
    assert ff.settings == ALONE and ff.input_scale is None
    assert flux.transformer.get_submodule("transformer_blocks.0.attn.to_q").input_scale is not None
    assert run_pipeline(flux, "flux").isfinite().all()


def test_a_scan_tries_them_as_they_will_be(flux):
    call = {"num_inference_steps": 1, "call_options": FAMILIES["flux"].call, "num_timesteps": 1}
    options = {"by": "block", "is_all": True, **call}
    found = scan_sensitivity(flux, ["a cat"], weight_only_layers=["modulation"], **options)
    both = scan_sensitivity(flux, ["a cat"], **options)
    alone = {row.name: row for row in found.rows if row.is_weight_only}
    assert sum(len(row.layers) for row in alone.values()) == NUM_MODULATION["flux"]
    kept = {row.name: row for row in both.rows if row.kept and "modulation" in row.kept}
    assert alone.keys() <= kept.keys()
    for name, row in alone.items():
        assert row.kept is None and 0 < row.error < kept[name].error
    assert found.error != both.error  # all at once has them
    assert str(found).count("(weight-only)") == len(alone)
    # What it proposes to ignore can be ignored beside them.
    quantized = [row for row in found.rows if row.kept is None and not row.is_weight_only]
    patterns = [row.pattern for row in quantized]
    with pytest.raises(ConfigError, match="got none in FluxTransformer2DModel"):
        apply_(flux, Recipe(linear="fp8", ignored_layers=patterns))
    apply_(flux, RECIPE.replace(ignored_layers=patterns))
    assert settings_of(flux.transformer).keys() == {n for r in alone.values() for n in r.layers}


def test_a_scan_of_all_layers_without_some(flux):
    for patterns in (
        ["modulation"],
        ["re:transformer_blocks"],
    ):  # the second leaves kept ones alone
        part = Scan(flux, "fp8", patterns, is_all=True).parts["transformer"]
        assert "proj_out" in part.plan.chosen
        assert "transformer_blocks.0.norm1.linear" not in part.plan.chosen
    with pytest.raises(ConfigError, match="in both: "):
        Scan(flux, "fp8", ["norm"], ["modulation"], is_all=True)


def test_weight_only_layers_are_not_proposed():
    def row(name, error, **others):
        options = {"component": "t", "pattern": name, "layers": (name,), "num_weights": 1}
        return SensitivityRow(name=name, error=error, errors={0: error}, **options, **others)

    rows = [row("mod", 9.0, is_weight_only=True), row("a", 3.0)]
    rows += [row(f"b{index}", 0.1) for index in range(9)]
    assert Sensitivity(rows=tuple(rows), error=1.0, floor=0.0).propose() == ["a"]
