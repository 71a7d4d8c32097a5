"""Decoders as the engine runs them: what is refused, and FP8 pages as apply_ has them."""

import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo_testkit.models.text_models import VISION_LANGUAGE, VOCABULARY, make_decoder

LAYERS = [f"model.layers.{i}.self_attn" for i in range(4)]
PER_HEAD = ScaleSet(
    {name: LayerScales(0.01, (0.01, 0.02), (0.02, 0.01)) for name in LAYERS},
    ScaleHeader(kind="kv_cache"),
).to_dict()
RECIPES = {
    "unit": octavo.Recipe(kv_cache={"scaling": "unit"}),
    "e5m2": octavo.Recipe(kv_cache={"format": "e5m2", "scaling": "unit"}),
    "token": octavo.Recipe(kv_cache={"granularity": "token", "scaling": "dynamic"}),
    "rotated": octavo.Recipe(
        kv_cache={"granularity": "token", "scaling": "dynamic", "rotate_keys": True}
    ),
    "static": octavo.Recipe(kv_cache={"granularity": "head", "scaling": "static"}, scales=PER_HEAD),
    "skipped": octavo.Recipe(
        kv_cache={"granularity": "head", "scaling": "static"}, scales=PER_HEAD, skip_layers=["0-1"]
    ),
}


def generate(llm, prompts, num_tokens=12):
    sampling = octavo.Sampling(max_tokens=num_tokens, temperature=0)
    # One at a time: scales of queries that follow the data would see those of others.
    return [llm.generate([prompt.tolist()], sampling)[0].tokens for prompt in prompts]


def make_prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def make_model(family="llama"):
    model = make_decoder(family, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj.weight" in name and "self_attn" in name:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_pages_in_fp8_give_the_tokens_of_apply_and_generate(family, recipe):
    prompts, truth = make_prompts(70, 12), []
    model = make_model(family)
    octavo.apply_(model, recipe)
    for prompt in prompts:
        out = model.generate(prompt[None], max_new_tokens=12, do_sample=False, pad_token_id=0)
        truth.append(tuple(out[0, len(prompt) :].tolist()))
    octavo.restore_(model)
    settings = octavo.EngineSettings(num_pages=8, enable_prefix_caching=False, max_num_seqs=2)
    with octavo.LLM(model, recipe=recipe, settings=settings) as llm:
        assert generate(llm, prompts) == truth
    with octavo.LLM(model, settings=settings) as plain:
        assert generate(plain, prompts) != truth or recipe.kv_cache.granularity == "token"


@pytest.mark.parametrize(
    ("name", "granularity"),
    [("unit", PerTensor()), ("token", PerToken()), ("static", PerHead())],
)
def test_the_cache_is_as_the_recipe_says(name, granularity):
    model = EngineModel(make_model(), RECIPES[name])
    spec = model.cache_spec(16)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.dtype, spec.granularity) == (torch.float8_e4m3fn, granularity)
    assert not spec.skip_layers
    model.close()


def test_skipped_layers_and_no_recipe_keep_the_dtype_of_the_model():
    model = EngineModel(make_model().bfloat16(), RECIPES["skipped"])
    spec = model.cache_spec(16)
    assert [spec.dtype_of(i) == torch.bfloat16 for i in range(4)] == [True, True, False, False]
    model.close()
    plain = EngineModel(make_model())
    assert plain.cache_spec(16).dtype == torch.float32
    plain.close()


def test_text_goes_through_a_model_with_vision():
    model = make_decoder(VISION_LANGUAGE)
    (prompt,) = make_prompts(20)
    out = model.generate(prompt[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    settings = octavo.EngineSettings(num_pages=8, max_num_seqs=2, max_num_batched_tokens=7)
    with octavo.LLM(model, settings=settings) as llm:
        assert generate(llm, [prompt], 8) == [tuple(out[0, 20:].tolist())]


def test_what_the_engine_cannot_do_is_refused():
    with pytest.raises(UnsupportedError, match="got vision_attention"):
        EngineModel(make_model(), octavo.Recipe(vision_attention="fp8"))
    with pytest.raises(ConfigError, match="eval"):
        EngineModel(make_model().train())
    with pytest.raises(UnsupportedError, match="ForCausalLM"):
        EngineModel(make_model().model)
    with pytest.raises(UnsupportedError, match="model of transformers, got Linear"):
        EngineModel(torch.nn.Linear(1, 1))
    uneven = make_model()
    uneven.model.layers[1].self_attn.head_dim = 8
    with pytest.raises(UnsupportedError, match=r"KV heads, got \[\(8, 2\), \(16, 2\)\]"):
        EngineModel(uneven)


def test_contexts_end_where_positions_would_change_for_others():
    rope = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    scaled = make_decoder("llama", rope_parameters=rope)
    assert EngineModel(scaled).max_context == 1024
    long = {
        "rope_theta": 1e4,
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    model = EngineModel(make_decoder("llama", rope_parameters=long))
    assert model.max_context == 64


def test_eos_is_that_of_generate():
    model = make_model()
    for own, expected in ((None, set()), (3, {3}), ([3, 4], {3, 4})):
        model.generation_config.eos_token_id = own
        made = EngineModel(model)
        assert made.eos_tokens == expected
        made.close()
