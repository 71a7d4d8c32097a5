"""Which layers stay in BF16: the table of every class, and the rule for classes without one."""

import pytest
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import ConfigError
from octavo.integrations.diffusers import linear as defaults
from octavo.integrations.linear import REQUIRED
from octavo.patterns import Layer, parse_pattern
from octavo_testkit.models.tiny_pipelines import FAMILIES, load_pipeline


def linear_names(model):
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]


@pytest.fixture(params=FAMILIES)
def transformer(request, folder_of):
    return load_pipeline(folder_of(request.param)).transformer


def test_every_family_has_a_table(transformer):
    assert type(transformer).__name__ in defaults.BY_CLASS


def test_modulation_embeddings_and_projections_always_stay(transformer):
    kept = defaults.kept_layers(transformer)
    words = ("time", "guidance", "t_embedder", "_mod", "modulation", "norm")
    for name in linear_names(transformer):
        if any(word in name for word in words):
            assert name in kept, name
    ends = ("x_embedder", "context_embedder", "img_in", "txt_in", "proj_in", "proj_out", "lm_head")
    assert set(ends) & set(linear_names(transformer)) <= kept.keys()


def test_projections_and_mlps_of_blocks_are_quantized(transformer):
    quantized = set(linear_names(transformer)) - defaults.kept_layers(transformer).keys()
    blocks = ("transformer_blocks.", "single_transformer_blocks.", "layers.", "blocks.")
    assert quantized
    assert all(
        name.startswith((*blocks, "noise_refiner.", "context_refiner.")) for name in quantized
    )
    in_blocks = [name for name in linear_names(transformer) if name.startswith(blocks)]
    for name in in_blocks:
        if ".to_" in name or ".add_" in name:
            assert name in quantized, name


def test_the_general_rule_finds_what_the_tables_list(transformer):
    required = {
        name for name, reason in defaults.kept_layers(transformer).items() if reason in REQUIRED
    }
    stranger = type("Stranger", (nn.Module,), {})()
    for name, module in transformer.named_children():
        stranger.add_module(name, module)
    assert defaults.kept_layers(stranger).keys() == required


def test_a_class_that_extends_one_of_the_table():
    made = type("Mine", (type("FluxTransformer2DModel", (nn.Module,), {}),), {})()
    assert defaults.kept_of(made) is defaults.BY_CLASS["FluxTransformer2DModel"]
    assert defaults.kept_of(nn.Linear(1, 1)) is defaults.GENERAL


def test_the_data_is_sound():
    tables = [*defaults.BY_CLASS.values(), defaults.GENERAL, defaults.TEXT_ENCODER]
    for kept in tables:
        for pattern in (*kept.required, *kept.optional):
            parse_pattern(pattern)
        assert set(kept.required.values()) <= REQUIRED
        assert not set(kept.optional.values()) & REQUIRED
    assert defaults.BY_CLASS["QwenImageTransformer2DModel"].optional.keys() == {"img_mlp"}


def test_names_that_the_general_rule_must_tell_apart():
    patterns = [parse_pattern(text) for text in defaults.GENERAL.required]
    kept = ("time_in", "txt_in.0", "blocks.0.norm1.linear", "blocks.1.adaLN_modulation.1")
    kept += ("final_layer.linear", "proj_out", "pos_embed.proj", "head", "patchify_proj")
    kept += ("guidance_embedder.linear_1", "blocks.0.img_mod.lin", "output_proj")
    free = (
        "blocks.0.proj_out",
        "blocks.0.attn.to_out.0",
        "blocks.0.mlp.fc_in",
        "blocks.3.ff.net.2",
    )
    free += (
        "layers.0.feed_forward.w1",
        "blocks.0.img_mlp.net.0.proj",
        "blocks.0.attn_temporal.to_q",
    )
    for name in kept:
        assert any(pattern.matches(Layer(name)) for pattern in patterns), name
    for name in free:
        assert not any(pattern.matches(Layer(name)) for pattern in patterns), name


def test_included_layers(folder_of):
    qwen = load_pipeline(folder_of("qwen_image")).transformer
    assert sum("img_mlp" in name for name in defaults.kept_layers(qwen)) == 4
    assert sum("img_mlp" in n for n in defaults.kept_layers(qwen, ["0"])) == 2
    with pytest.raises(ConfigError, match="matches none of the 4 layers"):
        defaults.kept_layers(qwen, ["txt_mod"])
