"""All seven families in BF16 and FP8, with ignored layers, saved and loaded; components."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import PipelineQuantizationConfig
from torch import nn

from octavo import (
    CheckpointError,
    ConfigError,
    OctavoConfig,
    Recipe,
    UnsupportedError,
    apply_,
    quantize_,
    restore_,
)
from octavo.integrations.diffusers import OctavoDiffusersConfig
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, load_pipeline, run_pipeline

BLOCKS = {"weight": "block 128x128"}
NUM_QUANTIZED = {
    "flux": 17,
    "qwen_image": 20,
    "z_image": 28,
    "flux2_klein": 14,
    "wan": 20,
    "hunyuan_video": 12,
    "cosmos3": 28,
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def fp8_layers(module):
    return [name for name, part in module.named_modules() if isinstance(part, Fp8Linear)]


def run_transformer(pipe, family):
    """The pipeline's result, and what its transformers made at the last step."""
    made = []

    def note(module, args, result):
        first = result[0] if isinstance(result, tuple) else result.sample
        first = first[0] if isinstance(first, list | tuple) else first
        made.append(first.detach().float().clone())

    hooks = [
        part.register_forward_hook(note)
        for name, part in pipe.components.items()
        if name.startswith("transformer") and part is not None
    ]
    result = run_pipeline(pipe, family)
    for hook in hooks:
        hook.remove()
    assert made and result.isfinite().all()
    return result, made[-1]


@pytest.fixture(scope="module")
def plain_of(folder_of):
    """What the BF16 transformer of a family makes."""
    found = {}

    def find(family):
        if family not in found:
            with torch.no_grad():
                found[family] = run_transformer(load_pipeline(folder_of(family)), family)
        return found[family]

    return find


@pytest.mark.parametrize("family", few("flux", "wan"))
def test_bf16_runs_twice_the_same(family, folder_of, plain_of):
    result, made = run_transformer(load_pipeline(folder_of(family)), family)
    assert result.std() > 0
    assert_same_bits(result, plain_of(family)[0])
    assert_same_bits(made, plain_of(family)[1])


@pytest.mark.parametrize("family", few("flux", "qwen_image", "cosmos3"))
@pytest.mark.parametrize("linear", ["fp8", BLOCKS], ids=["channel", "block"])
def test_fp8_is_close_to_bf16(family, linear, folder_of, plain_of):
    pipe = load_pipeline(folder_of(family))
    changes = apply_(pipe, Recipe(linear=linear))
    assert changes.layers["transformer.linear"] == fp8_layers(pipe.transformer)
    assert len(fp8_layers(pipe.transformer)) == NUM_QUANTIZED[family]
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and not name.startswith("transformer"):
            assert fp8_layers(part) == []
    _, made = run_transformer(pipe, family)
    # Three mantissa bits in each operand: about 4 % for one product, less where others add to it.
    assert 0 < relative_rms(made, plain_of(family)[1]) < 0.08


@pytest.mark.parametrize("family", few("flux", "wan"))
def test_attention_and_linear_with_ignored_layers_saved_and_loaded(
    family, folder_of, plain_of, tmp_path
):
    pipe = load_pipeline(folder_of(family))
    recipe = Recipe(linear="fp8", attention="fp8", ignored_layers=["to_q"])
    changes = apply_(pipe, recipe)
    names = fp8_layers(pipe.transformer)
    assert names and not any(name.endswith("to_q") for name in names)
    assert "ignored_layers" in set(changes.left["transformer.linear"].values())
    result, made = run_transformer(pipe, family)
    assert 0 < relative_rms(made, plain_of(family)[1]) < 0.08

    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert fp8_layers(loaded.transformer) == names
    for part in ("transformer", "transformer_2"):
        if getattr(pipe, part, None) is None:
            continue
        before, after = getattr(pipe, part).state_dict(), getattr(loaded, part).state_dict()
        assert before.keys() == after.keys()
        for name, x in before.items():
            assert_same_bits(after[name], x)
    apply_(loaded, Recipe(attention="fp8"))
    again, made_again = run_transformer(loaded, family)
    assert_same_bits(made_again, made)
    assert_same_bits(again, result)


@pytest.mark.parametrize("family", few("flux", "wan"))
def test_a_pattern_that_matches_nothing_raises_and_changes_nothing(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    for fields in (
        {"ignored_layers": ["img_mpl"]},
        {"attention": "fp8", "skip_layers": ["no_such_layer"]},
        {"included_layers": ["to_q"]},
    ):
        with pytest.raises(ConfigError, match="matches"):
            apply_(pipe, Recipe(linear="fp8", **fields))
    assert fp8_layers(pipe.transformer) == []
    with pytest.raises(ConfigError, match="got one as it was made"):
        restore_(pipe)


@pytest.mark.parametrize("family", few("flux", "wan"))
def test_attention_alone_is_restored_to_the_bit(family, folder_of, plain_of):
    pipe = load_pipeline(folder_of(family))
    changes = apply_(pipe, Recipe(attention="fp8"))
    _, made = run_transformer(pipe, family)
    assert 0 < relative_rms(made, plain_of(family)[1]) < 0.08
    assert restore_(pipe).layers == changes.layers
    assert_same_bits(run_transformer(pipe, family)[1], plain_of(family)[1])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    apply_(pipe, Recipe(linear="fp8", attention="fp8"))
    _, made = run_transformer(pipe, family)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert_same_bits(run_transformer(pipe, family)[1], made)


def test_both_transformers_of_wan(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    changes = apply_(pipe, Recipe(linear="fp8", ignored_layers=["attn2"]))
    assert set(changes.layers) == {"transformer.linear", "transformer_2.linear"}
    assert fp8_layers(pipe.transformer) == fp8_layers(pipe.transformer_2)
    assert not any("attn2" in name for name in fp8_layers(pipe.transformer))


def test_components_in_place_of_the_recipe(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    recipe = Recipe(
        linear="fp8",
        components={"transformer_2": {"linear": BLOCKS, "ignored_layers": ["ffn"]}, "vae": None},
    )
    changes = apply_(pipe, recipe)
    assert len(changes.layers["transformer.linear"]) == 20
    assert len(changes.layers["transformer_2.linear"]) == 16
    layer = pipe.transformer_2.get_submodule("blocks.0.attn1.to_q")
    assert layer.settings.weight == "block 128x128"


def test_a_component_that_is_left_alone(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    apply_(pipe, Recipe(linear="fp8", components={"transformer_2": None}))
    assert fp8_layers(pipe.transformer) and not fp8_layers(pipe.transformer_2)


@pytest.mark.parametrize("family", ["flux", "qwen_image", "z_image", "wan", "hunyuan_video"])
def test_text_encoders(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    changes = apply_(pipe, Recipe(text_encoder="fp8"))
    assert fp8_layers(pipe.transformer) == []
    encoders = [name for name in pipe.components if name.startswith("text_encoder")]
    assert list(changes.layers) == [f"{name}.linear" for name in encoders]
    for name in encoders:
        names = fp8_layers(getattr(pipe, name))
        assert names == changes.layers[f"{name}.linear"]
        # T5 casts activations to the dtype of wo's weight; a vision tower sees no text.
        assert not any({"wo", "visual", "lm_head"} & set(layer.split(".")) for layer in names)
    run_transformer(pipe, family)


def text_encoders(pipe):
    return [name for name in pipe.components if name.startswith("text_encoder")]


def assert_same_encoders(actual, expected):
    for name in text_encoders(expected):
        before, after = getattr(expected, name), getattr(actual, name)
        assert fp8_layers(after) == fp8_layers(before) != []
        before, after = before.state_dict(), after.state_dict()
        assert before.keys() == after.keys()
        for key, x in before.items():
            assert_same_bits(after[key], x)


ENCODER_FAMILIES = [
    pytest.param(family, marks=[] if family == "flux" else pytest.mark.slow)
    for family in FAMILIES
    if family != "cosmos3"  # its text runs inside of the transformer
]


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_quantized_text_encoders_are_saved_and_loaded(family, folder_of, tmp_path):
    pipe = load_pipeline(folder_of(family))
    apply_(pipe, Recipe(linear="fp8", text_encoder="fp8"))
    result, made = run_transformer(pipe, family)
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert_same_encoders(loaded, pipe)
    # T5 casts activations to the dtype of wo's weight, which stays plain.
    for name in text_encoders(loaded):
        for key, part in getattr(loaded, name).named_modules():
            if key.endswith(".wo"):
                assert type(part) is nn.Linear and part.weight.dtype == torch.bfloat16
    again, made_again = run_transformer(loaded, family)
    assert_same_bits(made_again, made)
    assert_same_bits(again, result)
    with pytest.raises(ConfigError, match="in FP8 already"):
        apply_(loaded, Recipe(text_encoder="fp8"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_text_encoders_are_quantized_as_they_load(family, folder_of, tmp_path):
    plain = load_pipeline(folder_of(family))
    mapping = {"transformer": OctavoDiffusersConfig()}
    for name in text_encoders(plain):
        has_tower = any(
            key.split(".")[-1] == "visual" for key, _ in getattr(plain, name).named_modules()
        )
        mapping[name] = OctavoConfig("fp8", ["visual"] if has_tower else [])
    config = PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = load_pipeline(folder_of(family), quantization_config=config)
    apply_(plain, Recipe(text_encoder="fp8"))
    assert_same_encoders(pipe, plain)
    result, _ = run_transformer(pipe, family)
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert_same_encoders(loaded, pipe)
    assert_same_bits(run_transformer(loaded, family)[0], result)


def test_patterns_match_in_one_of_the_components_that_share_them(folder_of):
    pipe = load_pipeline(folder_of("qwen_image"))
    recipe = Recipe(linear="fp8", text_encoder="fp8", ignored_layers=["txt_mlp", "down_proj"])
    changes = apply_(pipe, recipe)
    assert not any("txt_mlp" in name for name in changes.layers["transformer.linear"])
    assert not any("down_proj" in name for name in changes.layers["text_encoder.linear"])


def test_qwen_images_mlp_is_quantized_if_included(folder_of):
    pipe = load_pipeline(folder_of("qwen_image"))
    changes = apply_(pipe, Recipe(linear="fp8", included_layers=["img_mlp"]))
    assert sum("img_mlp" in name for name in changes.layers["transformer.linear"]) == 4
    assert len(changes.layers["transformer.linear"]) == NUM_QUANTIZED["qwen_image"] + 4


def test_what_is_always_kept_cannot_be_included(folder_of):
    pipe = load_pipeline(folder_of("qwen_image"))
    with pytest.raises(ConfigError, match="matches none of the 4 layers"):
        apply_(pipe, Recipe(linear="fp8", included_layers=["img_mod"]))
    with pytest.raises(ConfigError, match="matches none of the 4 layers"):
        apply_(pipe.transformer, Recipe(linear="fp8", included_layers=["img_mod"]))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ConfigError, "got an empty one"),
        ({"kv_cache": "fp8"}, UnsupportedError, "of a pipeline, got kv_cache"),
        ({"vision_attention": "fp8"}, UnsupportedError, "got vision_attention"),
        ({"components": {"unet": {"linear": "fp8"}}}, ConfigError, "got 'unet'"),
        ({"linear": "fp8", "components": {"unet": None}}, ConfigError, "got 'unet'"),
        ({"linear": "fp8", "components": {"transformer": None}}, ConfigError, "linear: expected"),
        ({"text_encoder": "fp8"}, ConfigError, "text_encoder: expected a pipeline with"),
        ({"components": {"vae": {"attention": "fp8"}}}, UnsupportedError, "vae: attention"),
        (
            {"attention": {"scaling": "static"}, "scales": {"a": {"q": 1, "k": 1, "v": 1}}},
            CheckpointError,
            "expected scales of layers named transformer",
        ),
    ],
)
def test_recipes_that_a_pipeline_cannot_have(fields, error, message, folder_of):
    pipe = load_pipeline(folder_of("cosmos3"))
    with pytest.raises(error, match=message):
        apply_(pipe, Recipe(**fields))
    assert fp8_layers(pipe.transformer) == []


def test_a_problem_with_one_component_leaves_all_as_they_were(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    pipe.transformer_2.blocks[1].attn1.to_q.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"transformer_2: .*finite weight, got 1 NaN"):
        apply_(pipe, Recipe(linear="fp8", attention="fp8"))
    assert fp8_layers(pipe.transformer) == []
    with pytest.raises(ConfigError, match="got one as it was made"):
        restore_(pipe)


def test_a_bare_transformer(folder_of):
    transformer = load_pipeline(folder_of("flux")).transformer
    changes = apply_(transformer, Recipe(linear="fp8", attention="fp8"))
    assert len(changes.layers["linear"]) == NUM_QUANTIZED["flux"]
    assert changes.layers["attention"] == [
        "transformer_blocks.0.attn",
        "single_transformer_blocks.0.attn",
    ]
    assert changes.left["linear"]["transformer_blocks.0.norm1.linear"].startswith("modulation")
    with pytest.raises(UnsupportedError, match="cannot be restored"):
        restore_(transformer)


def test_quantize_takes_a_pipeline(folder_of):
    pipe = load_pipeline(folder_of("flux"))
    assert "transformer.linear: 17 layers" in str(quantize_(pipe, "fp8"))
    with pytest.raises(UnsupportedError, match="cannot be restored"):
        restore_(pipe)
    with pytest.raises(ConfigError, match="in FP8 already"):
        quantize_(pipe, "fp8")


def test_attention_needs_a_model_of_diffusers():
    with pytest.raises(UnsupportedError, match="expected a transformer of diffusers"):
        apply_(nn.Sequential(nn.Linear(32, 32)), Recipe(attention="fp8"))
    with pytest.raises(ConfigError, match="expected a torch module or a pipeline"):
        apply_("flux", Recipe(attention="fp8"))
    with pytest.raises(ConfigError, match="there are no layers"):
        apply_(nn.Sequential(nn.Linear(32, 32)), Recipe(linear="fp8", included_layers=["0"]))
