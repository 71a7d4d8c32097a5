"""What a KV cache will hold, from configs: as the cache of a running model holds it."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig

from octavo import Recipe, apply_
from octavo.errors import CheckpointError, UnsupportedError
from octavo.integrations.transformers.cache_layers import (
    cached_model,
    read_cached_model,
)
from octavo.measure.advise.memory import cache_memory
from octavo.recipe import KvCacheSettings
from octavo_testkit.models.text_models import FAMILIES, make_decoder, make_prompts


@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_a_running_model(family, granularity):
    model = make_decoder(family, torch.bfloat16)
    found = cached_model(model.config, family)
    scaling = "dynamic" if granularity == "token" else "unit"
    settings = KvCacheSettings(granularity=granularity, scaling=scaling)
    apply_(model, Recipe(kv_cache=settings, skip_layers=["1"]))
    for num_tokens in (1, 64, 200):
        ids = make_prompts(1, num_tokens)["input_ids"]
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        expected = sum(layer.nbytes for layer in cache.layers)
        assert cache_memory(found.layers, num_tokens, settings, ["1"]).sequence == expected
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert found.weight_bytes == 2 * num_parameters
    assert found.max_length == 1024


def test_a_folder_of_configs_and_weights(tmp_path):
    model = make_decoder("llama", torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    without = read_cached_model(str(tmp_path))
    assert [layer.name for layer in without.layers][-1] == "model.layers.3.self_attn"
    assert read_cached_model(str(tmp_path / "config.json")).layers == without.layers
    (tmp_path / "model.safetensors").write_bytes(b"x" * 12345)  # quantized: another size
    assert read_cached_model(str(tmp_path)).weight_bytes == 12345


def test_layers_of_another_kind_are_named_and_latent_attention_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, num_experts=2)
    found = cached_model(config, "next")
    assert len(found.layers) == 1 and len(found.others) == 3
    with pytest.raises(UnsupportedError, match="DeepseekV3Attention"):
        cached_model(AutoConfig.for_model("deepseek_v3", num_hidden_layers=2), "mla")
    with pytest.raises(CheckpointError, match="expected a decoder's config"):
        cached_model(AutoConfig.for_model("vit"), "vit")
    with pytest.raises(CheckpointError, match="expected a model's config.json"):
        read_cached_model(str(tmp_path / "nowhere"))
