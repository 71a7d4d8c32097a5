"""Vision towers of transformers with FP8 attention: found, changed, undone."""

import copy
import json
from importlib import import_module

import pytest
import torch

from octavo import ConfigError, LayerScales, Recipe, ScaleSet, UnsupportedError, load_scales
from octavo.errors import CheckpointError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers import vision
from octavo.integrations.transformers.calibrate import autosave, layer_names
from octavo.integrations.transformers.vision_tower import make_pixels, make_tower
from octavo.layers.encoder_attention import EncoderAttention
from octavo.numerics.error import relative_rms
from octavo.testing.asserts import assert_same_bits

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN = {
    "depth": 2,
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}


def pixels():
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def patches():
    """Two images of 8 × 12 and 4 × 4 patches, as the Qwen towers take them."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 8, 12], [1, 4, 4]])
    rows = torch.randn(8 * 12 + 4 * 4, 3 * 2 * 4 * 4, generator=generator)
    return {"hidden_states": rows, "grid_thw": grid}


def tower(family, config, model, **sizes):
    """A vision tower of one of transformers' families, with random weights."""
    package = f"transformers.models.{family}"
    make_config = getattr(import_module(f"{package}.configuration_{family}"), config)
    return getattr(import_module(f"{package}.modeling_{family}"), model)(make_config(**sizes))


def stock(name):
    config = getattr(transformers, f"{name}Config")(**SMALL)
    return getattr(transformers, f"{name}Model")(config)


def sized_patches():
    """SigLIP 2's patches of two images without padding."""
    return {
        "pixel_values": torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(0)),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


POSITIONS = {"num_position_embeddings": 64}
DEEP = {**QWEN, **POSITIONS, "deepstack_visual_indexes": [0]}
QWEN2 = {**QWEN, "embed_dim": 144, "hidden_size": 32, "mlp_ratio": 1}
del QWEN2["intermediate_size"], QWEN2["out_hidden_size"]
SIGLIP2 = {**SMALL, "num_patches": 16}
del SIGLIP2["image_size"]
INTERN = {**SMALL, "image_size": [32, 32], "patch_size": [8, 8]}
QWEN25 = {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]}
QWEN25_MODEL = "Qwen2_5_VisionTransformerPretrainedModel"
PACKED = {
    "glm4v": ("Glm4vVisionConfig", "Glm4vVisionModel", {**QWEN, "image_size": 32}),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", QWEN25_MODEL, QWEN25),
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", QWEN2),
    "qwen3_5": ("Qwen3_5VisionConfig", "Qwen3_5VisionModel", {**QWEN, **POSITIONS}),
    "qwen3_5_moe": ("Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel", {**QWEN, **POSITIONS}),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionModel", DEEP),
    "qwen3_vl_moe": ("Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel", DEEP),
}
OTHERS = {
    "dinov3_vit": ("DINOv3ViTConfig", "DINOv3ViTModel", SMALL),
    "internvl": ("InternVLVisionConfig", "InternVLVisionModel", INTERN),
    "pixtral": ("PixtralVisionConfig", "PixtralVisionModel", SMALL),
    "siglip2": ("Siglip2VisionConfig", "Siglip2VisionModel", SIGLIP2),
}
INPUTS = {
    **dict.fromkeys(PACKED, patches),
    "pixtral": lambda: {**pixels(), "image_sizes": torch.tensor([[32, 32], [32, 32]])},
    "siglip2": sized_patches,
}
STOCK = {"clip": "CLIPVision", "dinov2": "Dinov2", "siglip": "SiglipVision", "vit": "ViT"}
MODELS = [*PACKED, *OTHERS, *STOCK]


def make(name):
    torch.manual_seed(0)
    if name in STOCK:
        return stock(STOCK[name]).eval(), pixels()
    config, model, sizes = (PACKED | OTHERS)[name]
    return tower(name, config, model, **sizes).eval(), INPUTS.get(name, pixels)()


@torch.inference_mode()
def run(model, inputs):
    return model(**inputs).last_hidden_state


def layers_of(model):
    layers = [m for m in model.modules() if isinstance(m, EncoderAttention)]
    return [layer for layer in layers if layer.scaling is not None]


@pytest.mark.parametrize("name", MODELS)
def test_a_tower_in_fp8_and_back(name):
    model, inputs = make(name)
    expected = run(model, inputs)
    keys, implementation = set(model.state_dict()), model.config._attn_implementation
    changes = apply_(model, Recipe(vision_attention="fp8"))
    fused = ", 2 of them fused" if name in PACKED else ""
    assert str(changes) == f"vision_attention: 2 layers{fused}"
    out = run(model, inputs)
    assert 0 < relative_rms(out, expected) < 0.05
    assert all(layer.scaling.num_passes == 1 for layer in layers_of(model))
    restore_(model)
    assert set(model.state_dict()) == keys
    assert model.config._attn_implementation == implementation
    assert_same_bits(run(model, inputs), expected)


@pytest.mark.parametrize("name", PACKED)
def test_images_do_not_see_each_other(name):
    """With static scales, another second image changes nothing in the first, to the bit."""
    model, inputs = make(name)
    names = list(vision.find_layers(model))
    scales = {layer: {"q": 0.01, "k": 0.01, "v": 0.01} for layer in names}
    apply_(model, Recipe(vision_attention={"scaling": "static"}, scales=scales))
    out = run(model, inputs)
    inputs["hidden_states"][96:] += 1
    other = run(model, inputs)
    kept = len(out) * 96 // 112
    assert_same_bits(other[:kept], out[:kept])
    assert not torch.equal(other[kept:], out[kept:])


def test_a_packed_tower_must_keep_images_apart():
    model, _ = make("qwen3_vl")
    apply_(model, Recipe(vision_attention="fp8"))
    module = next(iter(vision.find_layers(model).values()))
    x = torch.randn(1, 2, 5, 72)
    with pytest.raises(UnsupportedError, match="which keep images apart, got none"):
        vision.attend(module, x, x, x)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_all_images_in_one_call(name, monkeypatch):
    model, inputs = make(name)
    apply_(model, Recipe(vision_attention="fp8"))
    calls = []
    forward = EncoderAttention.forward

    def count(self, *args, **options):
        calls.append(options["cu_seqlens"].tolist())
        return forward(self, *args, **options)

    monkeypatch.setattr(EncoderAttention, "forward", count)
    run(model, inputs)
    assert len(calls) == 2
    assert calls[-1] == [0, 96, 112]


def test_skipped_layers_stay_in_their_dtype():
    model, inputs = make("qwen3_vl")
    expected = run(model, inputs)
    changes = apply_(model, Recipe(vision_attention="fp8", skip_layers=["0"]))
    assert changes.layers["vision_attention"] == ["blocks.1.attn"]
    assert len(layers_of(model)) == 1
    assert 0 < relative_rms(run(model, inputs), expected) < 0.05
    with pytest.raises(ConfigError, match="leaves none of the 2 layers"):
        apply_(make("vit")[0], Recipe(vision_attention="fp8", skip_layers=["0-1"]))
    with pytest.raises(ConfigError, match="matches"):
        apply_(make("vit")[0], Recipe(vision_attention="fp8", skip_layers=["layer_of_another"]))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_static_scales_from_a_scale_file(granularity):
    """By vLLM's names, which a tower alone does not have, or by the model's own."""
    model, inputs = make("qwen3_vl")
    settings = {"granularity": granularity}
    apply_(model, Recipe(vision_attention=settings))
    expected = run(model, inputs)
    found = {
        layer.name: LayerScales(
            *(
                tuple(x.tolist()) if x.dim() else float(x)
                for x in vars(layer.scaling.scales()).values()
            )
        )
        for layer in layers_of(model)
    }
    restore_(model)
    static = Recipe(
        vision_attention={**settings, "scaling": "static"},
        scales=ScaleSet(found).to_dict()["layers"],
    )
    apply_(model, static)
    assert_same_bits(run(model, inputs), expected)


def test_vllm_names():
    assert vision.scale_name("model.visual.blocks.3.attn") == "visual.blocks.3.attn.attn"
    assert vision.scale_name("visual.blocks.26.attn") == "visual.blocks.26.attn.attn"
    assert vision.scale_name("blocks.26.attn") == "visual.blocks.26.attn.attn"
    for name in ("vision.blocks.3.attn", "blocks.3.attn.proj", "blocks.x.attn"):
        assert vision.scale_name(name) == name
    assert vision.scale_name("vision_model.encoder.layers.0.self_attn") == (
        "vision_model.encoder.layers.0.self_attn"
    )
    names = {"visual.blocks.0.attn.attn": LayerScales(0.1, 0.1, 0.1)}
    assert vision._file_name("model.visual.blocks.0.attn", ScaleSet(names)) in names


def test_a_bare_tower_has_vllm_names(tmp_path):
    """A tower by itself writes vLLM's names, and loads them as well as its own."""
    tower = make_tower("tiny", torch.device("cpu")).module
    pixels = make_pixels(tower, [(256, 256)])
    path = tmp_path / "scales.json"
    apply_(tower, Recipe(vision_attention="fp8"))
    saver = autosave(tower, path)
    with torch.no_grad():
        for _ in range(16):
            tower(**pixels)
    saver.close()
    restore_(tower)
    names = [f"visual.blocks.{i}.attn.attn" for i in range(2)]
    scales = load_scales(path)
    assert list(scales.layers) == layer_names(tower) == names
    results = []
    own = {f"blocks.{i}.attn": scales.to_dict()["layers"][name] for i, name in enumerate(names)}
    for given in (str(path), own):
        apply_(tower, Recipe(vision_attention={"scaling": "static"}, scales=given))
        with torch.no_grad():
            results.append(tower(**pixels).pooler_output)
        restore_(tower)
    assert_same_bits(*results)


def test_a_whole_vision_language_model():
    """vLLM's names set every layer of the tower, and the text model stays as it is."""
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(
        vision_config=DEEP,
        text_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 50,
        },
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    before = model.config.text_config._attn_implementation
    one = {"q": 0.01, "k": 0.01, "v": 0.01}
    scales = {f"visual.blocks.{i}.attn.attn": one for i in range(2)}
    changes = apply_(model, Recipe(vision_attention={"scaling": "static"}, scales=scales))
    assert changes.layers["vision_attention"] == [f"model.visual.blocks.{i}.attn" for i in (0, 1)]
    assert [float(layer.scaling.q) for layer in layers_of(model)] == pytest.approx([0.01, 0.01])
    assert model.config.text_config._attn_implementation == before
    assert model.config.vision_config._attn_implementation == vision.IMPLEMENTATION
    inputs = patches()
    with torch.inference_mode():
        model.model.visual(**inputs)
    restore_(model)
    assert model.config.vision_config._attn_implementation != vision.IMPLEMENTATION


def test_a_layer_without_scales_is_named():
    model, _ = make("qwen3_vl")
    scales = {"blocks.0.attn": {"q": 0.1, "k": 0.1, "v": 0.1}}
    recipe = Recipe(vision_attention={"scaling": "static"}, scales=scales)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn"):
        apply_(model, recipe)
    assert not layers_of(model)
    with pytest.raises(ConfigError, match="expected scales per head, got one for all heads"):
        both = {f"blocks.{i}.attn": {"q": 0.1, "k": 0.1, "v": 0.1} for i in range(2)}
        per_head = {"scaling": "static", "granularity": "head"}
        apply_(model, Recipe(vision_attention=per_head, scales=both))
    assert model.config._attn_implementation != vision.IMPLEMENTATION


def test_scales_of_a_kv_cache_are_not_enough(tmp_path):
    model, _ = make("qwen3_vl")
    path = tmp_path / "scales.json"
    entry = {"q": None, "k": 0.1, "v": 0.1}
    path.write_text(json.dumps({f"blocks.{i}.attn": entry for i in range(2)}))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn: expected scales for q, k and v"):
        apply_(model, Recipe(vision_attention={"scaling": "static"}, scales=str(path)))
    assert not layers_of(model)


def test_scales_go_with_the_model():
    model, inputs = make("siglip")
    apply_(model, Recipe(vision_attention="fp8"))
    run(model, inputs)
    twin = copy.deepcopy(model)
    assert_same_bits(run(twin, inputs), run(model, inputs))
    assert [layer.scaling.num_passes.item() for layer in layers_of(twin)] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 5)}, "without padding, got an attention mask"),
        ({"dropout": 0.1}, "for inference, got dropout 0.1"),
        ({"is_causal": True}, "got a causal call"),
        ({"scaling": 0.5}, r"expected scaling .*, got 0.5"),
        ({"sliding_window": 4, "softcap": 2.0}, "got sliding_window, softcap"),
        ({"cu_seq_lens_k": torch.zeros(2)}, "expected one cu_seq_lens for queries and keys"),
    ],
)
def test_calls_that_are_refused(options, message):
    model, _ = make("vit")
    apply_(model, Recipe(vision_attention="fp8"))
    module = next(iter(vision.find_layers(model).values()))
    x = torch.randn(1, 2, 5, 72)
    with pytest.raises(UnsupportedError, match=message):
        vision.attend(module, x, x, x, **options)


def test_models_and_recipes_that_are_refused():
    text = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
        )
    )
    with pytest.raises(UnsupportedError, match="got LlamaForCausalLM with LlamaAttention"):
        apply_(text, Recipe(vision_attention="fp8"))
    model, _ = make("vit")
    with pytest.raises(UnsupportedError, match="attention: expected a transformer of diffusers"):
        apply_(model, Recipe(vision_attention="fp8", kv_cache="fp8", attention="fp8"))
    with pytest.raises(ConfigError, match="got an empty one"):
        apply_(model, Recipe())
    with pytest.raises(ConfigError, match="as it was made"):
        restore_(model)
    apply_(model, Recipe(vision_attention="fp8"))
    with pytest.raises(ConfigError, match="restore_ it first"):
        apply_(model, Recipe(vision_attention="fp8"))


def test_the_text_tower_of_clip_stays():
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        vision_config=SMALL,
        text_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 50,
        },
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    changes = apply_(model, Recipe(vision_attention="fp8"))
    names = changes.layers["vision_attention"]
    assert len(names) == 2 and all(name.startswith("vision_model") for name in names)
    assert model.text_model.config._attn_implementation != vision.IMPLEMENTATION
    with torch.inference_mode():
        model(**pixels(), input_ids=torch.tensor([[3, 4, 5]]))
    restore_(model)
