"""Models beside the seven families run or say why not, as docs/reference/support.md says."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
pytest.importorskip("PIL")

from octavo import OctavoConfig, Recipe, apply_, calibrate_linear, quantize_
from octavo.errors import UnsupportedError
from octavo.integrations.diffusers.linear import BY_CLASS, kept_layers
from octavo.integrations.linear import KEPT_PARTS
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo_testkit.models import support_models as models

PIPELINES = {
    "GLM-Image": (models.make_glm_image, models.run_glm_image),
    "HunyuanImage-2.1": (models.make_hunyuan_image, models.run_hunyuan_image),
    "HunyuanVideo-1.5 from an image": (models.make_image_to_video, models.run_image_to_video),
}
FP8 = {
    "dynamic": Recipe(linear="fp8"),
    "block": Recipe(linear={"weight": "block 128x128"}),
    "attention": Recipe(linear="fp8", attention="fp8"),
    "text encoder": Recipe(linear="fp8", text_encoder="fp8"),
}


def fp8_layers(model):
    return {name for name, part in model.named_modules() if isinstance(part, Fp8Linear)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FP8.values(), ids=FP8)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_in_fp8(name, recipe):
    make, run = PIPELINES[name]
    before = run(make())
    pipe = make()
    changes = apply_(pipe, recipe)
    assert fp8_layers(pipe.transformer) == set(changes.layers["transformer.linear"])
    assert all(
        ".transformer_blocks." in f".{layer}" or ".single_" in f".{layer}"
        for layer in changes.layers["transformer.linear"]
    )
    after = run(pipe)
    assert after.isfinite().all() and 0 < relative_rms(after, before) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent_concat", "token_replace"])
@pytest.mark.parametrize("recipe", [FP8["dynamic"], FP8["attention"]], ids=["linear", "attention"])
def test_hunyuan_video_from_an_image_runs_in_fp8(kind, recipe):
    model = models.make_hunyuan_video_transformer(kind)
    before = models.run_hunyuan_video_transformer(model)
    apply_(model, recipe)
    after = models.run_hunyuan_video_transformer(model)
    assert after.isfinite().all() and 0 < relative_rms(after, before) < 0.05


def test_only_blocks_are_quantized():
    """Whatever is outside of them stays, each with a reason of its class."""
    from diffusers import GlmImageTransformer2DModel, HunyuanImageTransformer2DModel

    with torch.device("meta"):
        made = [
            GlmImageTransformer2DModel(num_layers=1),
            HunyuanImageTransformer2DModel(
                num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_2_dim=64
            ),
            models.HunyuanVideoTransformer3DModel(
                num_layers=1, num_single_layers=1, num_refiner_layers=1
            ),
        ]
    for model in made:
        assert type(model).__name__ in BY_CLASS
        linears = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
        chosen = set(linears) - kept_layers(model).keys()
        inside = {n for n in linears if n.split(".")[0].endswith("transformer_blocks")}
        assert chosen == {n for n in inside if "norm" not in n}


def test_the_thinker_of_qwen3_omni_is_quantized_alone():
    model = models.make_qwen3_omni()
    before = models.run_thinker(model)
    changes = quantize_(model)
    chosen = changes.layers["linear"]
    assert fp8_layers(model) == set(chosen)
    assert all(name.startswith("thinker.model.language_model.layers.") for name in chosen)
    leaves = {name.rpartition(".")[2] for name in chosen}
    mlp = {"gate_proj", "up_proj", "down_proj"}  # of the layer without experts
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj"} | mlp
    after = models.run_thinker(model)
    assert after.isfinite().all() and 0 < relative_rms(after, before) < 0.1
    left = changes.left["linear"]
    for part, kind in (
        ("thinker.model.audio_tower", "AudioEncoder"),
        ("thinker.model.visual", "VisionEncoder"),
        ("talker", "TalkerForConditionalGeneration"),
        ("code2wav", "Code2Wav"),
    ):
        reason = KEPT_PARTS[f"Qwen3OmniMoe{kind}"]
        linears = {
            f"{part}.{name}"
            for name, module in model.get_submodule(part).named_modules()
            if type(module) is torch.nn.Linear
        }
        assert linears and linears <= {name for name, why in left.items() if why == reason}
    assert "not a plain nn.Linear" in left["thinker.model.language_model.layers.0.mlp.experts"]


def test_a_part_that_is_asked_for_is_quantized():
    model = models.make_qwen3_omni()
    changes = quantize_(model.code2wav)
    assert fp8_layers(model) == {f"code2wav.{name}" for name in changes.layers["linear"]}
    with pytest.raises(UnsupportedError, match="attention: expected a transformer of diffusers"):
        apply_(model, Recipe(attention="fp8"))


@pytest.mark.slow
def test_qwen3_omni_loads_in_fp8_and_again(tmp_path):
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    models.make_qwen3_omni().save_pretrained(plain)
    kind = models.Qwen3OmniMoeForConditionalGeneration
    options = {"dtype": torch.bfloat16}
    expected = kind.from_pretrained(plain, **options)
    quantize_(expected)
    loaded = kind.from_pretrained(plain, quantization_config=OctavoConfig("fp8"), **options)
    assert fp8_layers(loaded) == fp8_layers(expected)
    assert torch.equal(models.run_thinker(loaded), models.run_thinker(expected))
    loaded.save_pretrained(saved)
    again = kind.from_pretrained(saved, **options)
    assert fp8_layers(again) == fp8_layers(expected)
    assert torch.equal(models.run_thinker(again), models.run_thinker(expected))


@pytest.mark.slow
def test_scales_of_the_thinker_need_no_speech():
    """Parts that stay are not calibrated: text alone reaches none of them."""
    model = models.make_qwen3_omni()
    scales = calibrate_linear(model.thinker, [{"input_ids": torch.arange(1, 24).reshape(1, -1)}])
    changes = quantize_(model.thinker, {"scaling": "static"}, scales=scales)
    assert set(changes.layers["linear"]) == set(scales.inputs)
    assert models.run_thinker(model).isfinite().all()


@pytest.mark.parametrize(
    ("package", "folder"),
    [
        ("transformers", "models/bagel"),
        ("transformers", "models/qwen3_tts"),
        ("transformers", "models/hunyuan_image_3"),
        ("transformers", "models/hunyuan_image3"),
        ("diffusers", "pipelines/bagel"),
        ("diffusers", "pipelines/hunyuan_image3"),
    ],
)
def test_what_is_not_supported_is_not_there(package, folder):
    """Once it is: make a small one here, and change docs/reference/support.md."""
    spec = importlib.util.find_spec(package)
    root = Path(spec.origin).parent
    assert (root / folder).parent.is_dir() and not (root / folder).exists()
