"""FP8 linear layers through diffusers' loading and saving: the bits of apply_, or an error."""

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import FluxTransformer2DModel, PipelineQuantizationConfig
from diffusers.quantizers.auto import DiffusersAutoQuantizer
from safetensors.torch import load_file, save_file

from octavo import CheckpointError, ConfigError, Recipe, apply_, restore_
from octavo.errors import UnsupportedError
from octavo.integrations.diffusers import OctavoDiffusersConfig
from octavo.layers.linear import Fp8Linear
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_pipelines import few, load_pipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"
LAYER = "transformer_blocks.0.attn.to_k"


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def load(folder, **options):
    options = {"dtype": torch.bfloat16, **options}
    return FluxTransformer2DModel.from_pretrained(folder, **options)


def fp8_layers(module):
    return [name for name, part in module.named_modules() if isinstance(part, Fp8Linear)]


def assert_same_state(actual, expected):
    before, after = expected.state_dict(), actual.state_dict()
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert_same_bits(after[name], x)


@pytest.fixture
def flux_folder(folder_of):
    return folder_of("flux") / "transformer"


@pytest.fixture
def saved(flux_folder, tmp_path):
    """The folder of a quantized transformer."""
    load(flux_folder, quantization_config=OctavoDiffusersConfig()).save_pretrained(tmp_path)
    return tmp_path


def change_file(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", few("flux", "wan"))
def test_pipelines_quantize_as_they_load(family, folder_of):
    names = [name for name in ("transformer", "transformer_2") if name in _parts(folder_of(family))]
    mapping = {name: OctavoDiffusersConfig() for name in names}
    pipe = load_pipeline(
        folder_of(family), quantization_config=PipelineQuantizationConfig(quant_mapping=mapping)
    )
    expected = load_pipeline(folder_of(family))
    apply_(expected, Recipe(linear="fp8"))
    for name in names:
        assert_same_state(getattr(pipe, name), getattr(expected, name))
        assert fp8_layers(getattr(pipe, name)) == fp8_layers(getattr(expected, name))


def _parts(folder):
    index = json.loads((folder / "model_index.json").read_text())
    return [name for name, value in index.items() if isinstance(value, list) and value[0]]


@pytest.mark.parametrize(
    "linear", ["fp8", {"weight": "tensor"}, {"weight_block_size": [128, 128]}, {"activation": None}]
)
def test_settings_and_patterns_survive_a_file(linear, flux_folder, tmp_path):
    config = OctavoDiffusersConfig(linear, ignored_layers=["ff_context"])
    model = load(flux_folder, quantization_config=config)
    assert not any("ff_context" in name for name in fp8_layers(model))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_state(again, model)
    assert again.get_submodule(LAYER).settings == config.linear
    assert again.config["quantization_config"].to_dict() == config.to_dict()
    again.save_pretrained(tmp_path / "again")
    assert_same_state(load(tmp_path / "again"), model)


def test_scales_are_not_rounded_to_the_models_dtype(saved):
    model = load(saved)
    scale = model.get_submodule(LAYER).weight_scale
    assert scale.dtype == torch.float32
    assert not torch.equal(scale, scale.bfloat16().float())


def test_many_files(flux_folder, tmp_path):
    model = load(flux_folder, quantization_config=OctavoDiffusersConfig())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_state(load(tmp_path), model)


def test_without_a_dtype_it_is_float32(flux_folder):
    model = load(flux_folder, dtype=None, quantization_config=OctavoDiffusersConfig())
    expected = load(flux_folder, dtype=torch.float32)
    apply_(expected, Recipe(linear="fp8"))
    assert_same_state(model, expected)


def test_weights_are_quantized_one_by_one(flux_folder, monkeypatch):
    """No plain weight is in the model beside its FP8 one at any time."""
    seen = []
    quantize = Fp8Linear.quantize_weight_

    def note(layer, weight):
        assert layer.weight.is_meta and layer.weight.dtype == torch.float8_e4m3fn
        quantize(layer, weight)
        seen.append(layer.name)

    monkeypatch.setattr(Fp8Linear, "quantize_weight_", note)
    model = load(flux_folder, quantization_config=OctavoDiffusersConfig())
    assert sorted(seen) == sorted(fp8_layers(model))


def test_static_scales_are_saved_with_the_model(flux_folder, tmp_path):
    model = load(flux_folder)
    names = fp8_layers(load(flux_folder, quantization_config=OctavoDiffusersConfig()))
    scales = {name: {"input": 0.01 + i / 700} for i, name in enumerate(names)}
    apply_(model, Recipe(linear={"scaling": "static"}, scales=scales))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_state(again, model)
    assert again.get_submodule(names[3]).input_scale.item() == pytest.approx(0.01 + 3 / 700)
    with pytest.raises(ConfigError, match="expected scaling 'dynamic' to quantize while loading"):
        config = OctavoDiffusersConfig({"scaling": "static"})
        load(flux_folder, quantization_config=config)


def test_a_quantized_model_cannot_be_restored_or_quantized_again(saved):
    model = load(saved)
    with pytest.raises(UnsupportedError, match="cannot be restored"):
        restore_(model)
    with pytest.raises(ConfigError, match="in FP8 already"):
        apply_(model, Recipe(linear="fp8"))


@pytest.mark.parametrize("field", ["ignored_layers", "included_layers"])
def test_patterns_that_match_nothing(field, flux_folder):
    with pytest.raises(ConfigError, match="matches"):
        load(flux_folder, quantization_config=OctavoDiffusersConfig(**{field: ["img_mpl"]}))


def drop_scale(tensors):
    del tensors[f"{LAYER}.weight_scale"]


def drop_weight(tensors):
    del tensors[f"{LAYER}.weight"]


def rename_weight(tensors):
    tensors["x_embedder_2.weight"] = tensors.pop("x_embedder.weight")


def spoil_scale(tensors):
    tensors[f"{LAYER}.weight_scale"][1] = torch.nan


def shorten_scale(tensors):
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][1:].clone()


def widen_weight(tensors):
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].bfloat16()


def add_scale(tensors):
    tensors["no_such_layer.weight_scale"] = torch.ones(3)


def drop_all_scales(tensors):
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_scale, f"{LAYER}: expected weight_scale for its FP8 weight"),
        (drop_weight, f"got '{LAYER}.weight_scale"),
        (rename_weight, "expected tensors of FluxTransformer2DModel, got 'x_embedder_2.weight'"),
        (spoil_scale, "expected positive finite scales"),
        (shorten_scale, r"expected shape \[32\] or \[32, 1\] .*got \[31\]"),
        (widen_weight, f"got '{LAYER}.weight_scale"),
        (add_scale, "got 'no_such_layer.weight_scale"),
        (drop_all_scales, "expected weight_scale for its FP8 weight"),
    ],
)
def test_broken_files_raise(change, message, saved):
    change_file(saved, change)
    with pytest.raises(CheckpointError, match=message):
        load(saved)


def test_config():
    config = OctavoDiffusersConfig({"weight": "tensor"}, ["a"], ["b"])
    text = json.dumps(config.to_dict())
    assert DiffusersAutoQuantizer.from_dict(json.loads(text)).to_dict() == config.to_dict()
    assert '"weight": "tensor"' in repr(config)
    for options, message in (
        ({"linear": None}, "expected 'fp8' or settings"),
        ({"linear": "fp4"}, "got 'fp4'"),
        ({"ignored_layers": ["re:("]}, "regular expression"),
        ({"quant_method": "torchao"}, "expected quant_method 'octavo'"),
    ):
        with pytest.raises(ConfigError, match=message):
            OctavoDiffusersConfig(**options)
