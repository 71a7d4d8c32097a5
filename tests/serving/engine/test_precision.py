"""What an engine says of its precision: layers in FP8, bytes of the cache, in numbers and words."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from octavo.recipe import Recipe
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models.vision_families import make_model as make_vision_model
from octavo_testkit.models.vision_families import make_processor
from octavo_testkit.serving.tiny_engine import make_engine, make_model


def counts(engine):
    """(layers in FP8, all layers) of each kind."""
    return {one.kind: (one.num_fp8, one.num_layers) for one in engine.precision.layers}


def cache(engine):
    return {(one.kind, one.dtype, one.part): one.num_bytes for one in engine.precision.cache}


def test_nothing_in_fp8():
    engine = make_engine(make_model().bfloat16())
    assert counts(engine) == {"kv_cache": (0, 2), "linear": (0, 15)}
    storage = engine._runner.storage
    pages = sum(x.nbytes for x in (*storage.key_pages, *storage.value_pages))
    assert cache(engine)["full_attention", "bfloat16", "pages"] == pages
    size = f"{storage.nbytes / 2**20:.1f} MiB"
    assert str(engine.precision) == f"KV cache: BF16, {size}; linear layers: BF16"


def test_some_layers_in_fp8():
    kv_cache = {"scaling": "unit", "granularity": "head"}
    recipe = Recipe(kv_cache=kv_cache, skip_layers=["0"], linear="fp8")
    engine = make_engine(make_model().bfloat16(), recipe)
    assert counts(engine) == {"kv_cache": (1, 2), "linear": (14, 15)}
    found = cache(engine)
    plain = found["full_attention", "bfloat16", "pages"]
    assert found["full_attention", "float8_e4m3fn", "pages"] == plain / 2
    assert sum(found.values()) == engine._runner.storage.nbytes
    assert str(engine.precision) == (
        f"KV cache: FP8 in 1 of 2 layers (model.layers.0.self_attn in BF16), "
        f"{sum(found.values()) / 2**20:.1f} MiB; linear layers: FP8 in 14 of 15 (lm_head in BF16)"
    )


def test_scales_of_tokens_are_counted_beside_their_pages():
    recipe = Recipe(kv_cache={"granularity": "token", "scaling": "dynamic"})
    engine = make_engine(make_model().bfloat16(), recipe)
    found = cache(engine)
    head_dim = engine._model.head_dim
    pages = found["full_attention", "float8_e4m3fn", "pages"]
    assert found["full_attention", "float32", "scales"] * head_dim == pages * 4


def test_windows_experts_and_weight_only_layers():
    recipe = Recipe(
        kv_cache={"format": "e5m2", "scaling": "unit"},
        skip_layers=["sliding_window"],
        linear="fp8",
        weight_only_layers=["o_proj"],
    )
    engine = make_engine(make_model("gpt_oss").bfloat16(), recipe)
    found = cache(engine)
    assert found["sliding_window", "bfloat16", "pages"] == (
        2 * found["full_attention", "float8_e5m2", "pages"]
    )
    assert engine.precision.words()["KV cache"].startswith(
        "FP8 in 1 of 2 layers (e5m2, model.layers.0.self_attn in BF16), "
    )
    # Of both layers: q, k, v and o; neither the experts nor their router, nor the head.
    linear = engine.precision.words()["linear layers"]
    assert linear == "FP8 in 8 of 13 (weights only in 2, 5 in BF16)"


@pytest.mark.parametrize(("dtype", "num_fp8"), [(None, 0), ("fp8", 2)])
def test_vision_attention(dtype, num_fp8):
    model = make_vision_model("qwen3_vl")
    recipe = Recipe(vision_attention=dtype) if dtype else None
    settings = EngineSettings(page_size=16, num_pages=16, max_num_seqs=4)
    engine = load_engine(model, recipe, settings, image_processor=make_processor())
    found = counts(engine)["vision_attention"]
    assert found[0] == (found[1] if num_fp8 else 0) and found[1] > 0
    word = {torch.float32: "FP32", torch.bfloat16: "BF16"}[model.dtype]
    expected = f"FP8 in all {found[1]} layers" if num_fp8 else word
    assert engine.precision.words()["vision attention"] == expected
    engine.close()
