"""FP8 pipelines as other projects write them: their own bits run, or an error says why not."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

import diffusers
import transformers
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from octavo import CheckpointError, ConfigError, Recipe, apply_, load_fp8
from octavo.integrations.diffusers.linear import kept_layers
from octavo.integrations.diffusers.load import load_pipeline
from octavo.integrations.linear import plan_linear
from octavo.layers.linear import Fp8Linear
from octavo.numerics.granularity import PerChannel, parse_granularity
from octavo.numerics.quantize import quantize
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.fp8_folders import BLOCK_FP8, compressed_tensors
from octavo_testkit.models.tiny_pipelines import run_pipeline

MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["proj_out*"]}
INPUT_SCALE = 0.02
LAYER = "transformer_blocks.0.attn.to_k"
TRANSFORMERS = {
    "flux": "FluxTransformer2DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    "z_image": "ZImageTransformer2DModel",
}


@pytest.fixture(autouse=True)
def no_gradients(without_gradients):
    pass


def fp8_tensors(model, weight, *, is_static=False, names=("weight_scale", "input_scale")):
    """A model's tensors with linear layers in FP8, and what their weights stand for, by layer."""
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    is_encoder = isinstance(model, transformers.PreTrainedModel)
    kept = {} if is_encoder else kept_layers(model)
    granularity, twins = parse_granularity(weight), {}
    for layer in plan_linear(model, kept=kept).chosen:
        quantized = quantize(tensors[f"{layer}.weight"], granularity)
        scale = quantized.scale[:, None] if isinstance(granularity, PerChannel) else quantized.scale
        tensors[f"{layer}.weight"] = quantized.data
        tensors[f"{layer}.{names[0]}"] = scale.contiguous()
        if is_static:
            tensors[f"{layer}.{names[1]}"] = torch.tensor(INPUT_SCALE)
        twins[layer] = quantized.dequantize()
    return tensors, twins


def write_fp8(pipeline, to, component, kind, weight="tensor", *, said=None, **options):
    """A copy of a pipeline with one component in FP8, and the twins of its weights.

    said: the component's quantization_config.
    """
    folder = shutil.copytree(pipeline, to / "pipeline")
    part = folder / component
    library = diffusers if hasattr(diffusers, kind) else transformers
    model = getattr(library, kind).from_pretrained(part, dtype=torch.float32)
    tensors, twins = fp8_tensors(model, weight, **options)
    (path,) = part.glob("*.safetensors")
    save_file(tensors, path, metadata={"format": "pt"})
    if said is not None:
        config = json.loads((part / "config.json").read_text())
        (part / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return folder, twins


def assert_is_fp8(model, twins):
    """The layers of the file are FP8, with its bits, and no others are."""
    layers = {n: part for n, part in model.named_modules() if isinstance(part, Fp8Linear)}
    assert layers.keys() == twins.keys()
    for name, layer in layers.items():
        assert_same_bits(layer.dequantize(), twins[name])


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_modelopt_is_as_good_as_quantizing_its_dequantized_twin(family, folder_of, tmp_path):
    said = {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    folder, twins = write_fp8(
        folder_of(family), tmp_path, "transformer", TRANSFORMERS[family], "channel", said=said
    )
    pipe = load_pipeline(folder, torch.float32, "cpu")
    assert_is_fp8(pipe.transformer, twins)
    twin = load_pipeline(folder_of(family), torch.float32, "cpu")
    for name, weight in twins.items():
        twin.transformer.get_submodule(name).weight.copy_(weight)
    expected = run_pipeline(twin, family)
    apply_(twin, Recipe(components={"transformer": {"linear": "fp8"}}))
    budget = relative_error(run_pipeline(twin, family), expected)
    assert 0 < relative_error(run_pipeline(pipe, family), expected) <= 1.5 * budget


def test_static_scales_of_modelopt(folder_of, tmp_path):
    folder, twins = write_fp8(
        folder_of("flux"), tmp_path, "transformer", TRANSFORMERS["flux"], said=MODELOPT,
        is_static=True,
    )  # fmt: skip
    model = load_pipeline(folder, torch.bfloat16, "cpu").transformer
    assert_is_fp8(model, twins)
    scale = model.get_submodule(LAYER).input_scale
    assert scale.dtype == torch.float32 and scale == torch.tensor(INPUT_SCALE)
    # What is saved is octavo's, and loads to the bit.
    model.save_pretrained(tmp_path / "again")
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert_is_fp8(again, twins)
    assert again.config["quantization_config"].to_dict()["quant_method"] == "octavo"


def test_a_file_of_modelopt_beside_the_config(folder_of, tmp_path):
    folder, twins = write_fp8(
        folder_of("flux"), tmp_path, "transformer", TRANSFORMERS["flux"], is_static=True
    )
    part = folder / "transformer"
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (part / "hf_quant_config.json").write_text(json.dumps(said))
    assert_is_fp8(load_pipeline(folder, device="cpu").transformer, twins)
    assert_is_fp8(load_fp8(FluxTransformer2DModel, folder, subfolder="transformer"), twins)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ("channel", compressed_tensors()),
        ("block 128x128", BLOCK_FP8),
        ("tensor", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("channel", None),
        ("tensor", None),
    ],
    ids=["compressed-tensors", "blocks", "fp8", "no config, channel", "no config, tensor"],
)
def test_other_writers(weight, said, folder_of, tmp_path):
    names = ("weight_scale_inv" if "block" in weight else "weight_scale", "input_scale")
    folder, twins = write_fp8(
        folder_of("flux"), tmp_path, "transformer", TRANSFORMERS["flux"], weight, said=said,
        names=names,
    )  # fmt: skip
    model = load_fp8(FluxTransformer2DModel, folder / "transformer")
    assert_is_fp8(model, twins)
    assert model.get_submodule(LAYER).settings.weight == weight
    if said is not None:
        plain = FluxTransformer2DModel.from_pretrained(folder / "transformer")
        assert_is_fp8(plain, twins)


@pytest.mark.parametrize("said", [MODELOPT, None], ids=["modelopt", "no config"])
def test_text_encoders(said, folder_of, tmp_path):
    folder, twins = write_fp8(
        folder_of("flux"), tmp_path, "text_encoder", "CLIPTextModel", said=said, is_static=True
    )
    pipe = load_pipeline(folder, torch.float32, "cpu")
    found = {n: m for n, m in pipe.text_encoder.named_modules() if isinstance(m, Fp8Linear)}
    assert found  # some of them joined into one product
    assert run_pipeline(pipe, "flux").isfinite().all()
    assert len(twins) >= len(found)


def test_what_is_not_understood_raises(folder_of, tmp_path):
    folder, _ = write_fp8(
        folder_of("flux"), tmp_path, "transformer", TRANSFORMERS["flux"], said=MODELOPT,
        is_static=True,
    )  # fmt: skip
    part = folder / "transformer"
    (path,) = part.glob("*.safetensors")
    tensors = load_file(path)

    def refusal(change, match):
        changed = dict(tensors)
        change(changed)
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=match):
            load_pipeline(folder, device="cpu")

    refusal(lambda x: x.pop(f"{LAYER}.input_scale"), f"{LAYER}: expected an input_scale")
    refusal(lambda x: x.update({"extra.weight": torch.ones(2)}), "got 'extra.weight'")
    second = {f"{LAYER}.weight_scale_2": torch.tensor(1.0)}
    refusal(lambda x: x.update(second), "weight_scale_2")
    foreign = {"no.such.layer.weight": tensors[f"{LAYER}.weight"].clone()}
    refusal(lambda x: x.update(foreign), "got some of 'no.such.layer'")
    spoiled = tensors[f"{LAYER}.weight"].clone()
    spoiled.view(torch.uint8)[0, 0] = 0x7F
    refusal(lambda x: x.update({f"{LAYER}.weight": spoiled}), f"{LAYER}: .*got NaN")
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((part / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4"
    (part / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected quant_algo FP8"):
        load_pipeline(folder, device="cpu")


@pytest.mark.parametrize(
    ("said", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_type": "FP8"}, "modelopt"),
    ],
)
def test_what_the_libraries_quantize_themselves_is_left_to_them(said, method, folder_of, tmp_path):
    """They say what their own package lacks, or load the model by it."""
    folder = shutil.copytree(folder_of("flux"), tmp_path / "pipeline")
    path = folder / "transformer" / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": said}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"a pipeline of diffusers, got .*{method}"):
        load_pipeline(folder, device="cpu")


def test_a_plain_model_is_not_fp8(folder_of):
    with pytest.raises(CheckpointError, match="expected weights in FP8, got others"):
        load_fp8(FluxTransformer2DModel, folder_of("flux") / "transformer")
    with pytest.raises(ConfigError, match="expected a folder or a file"):
        load_fp8(FluxTransformer2DModel, "no/such/place")
