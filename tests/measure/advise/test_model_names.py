"""Names of models: of the hub, of families, misspelt, and folders of the same name."""

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig

from octavo.errors import ConfigError
from octavo.measure.advise.predict import shape_of
from octavo.measure.advise.shape import HUB_NAMES, SHORT_NAMES, find_model, known_models, near_names


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b"),
        ("qwen3-vl-8b-instruct", "qwen3-vl-8b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
    ],
)
def test_hub_names(name, known):
    found = find_model(name)
    assert found.name == known and found.decoder is not None and found.note is None


def test_families_are_one_stated_size():
    found = find_model("qwen3-vl")
    assert found.name == "qwen3-vl-8b"
    assert found.note == "qwen3-vl is taken as qwen3-vl-8b; octavo also knows qwen3-vl-30b-a3b."
    assert find_model("gpt-oss").name == "gpt-oss-20b"


def test_every_name_is_of_a_model_that_is_known():
    pytest.importorskip("diffusers")
    assert {*HUB_NAMES, *SHORT_NAMES.values()} <= set(known_models())


def test_gpt_oss_20b_has_its_experts():
    """Not the model of benchmarks, gpt-oss-like, which has a dense MLP in their place."""
    found = find_model("openai/gpt-oss-20b")
    assert (found.decoder.experts.num_experts, found.decoder.experts.num_per_token) == (32, 4)
    assert found.decoder.weight_bytes / 2 == pytest.approx(20.9e9, rel=0.01)
    assert found.quantized == "mxfp4" and found.decoder.windows == (128,)
    assert found.decoder.other_parts == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3-vl-9b", "qwen3-vl-8b"),
        ("openai/gpt-oss-20", "openai/gpt-oss-20b"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("someone/Llama-3.1-8B-Instruct-v2", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_did_you_mean(name, meant):
    assert meant in near_names(name, known_models())
    with pytest.raises(ConfigError, match=f"got '{name}'. Did you mean .*{meant}.*\\?"):
        find_model(name)


def test_nothing_is_suggested_for_a_name_like_no_other():
    with pytest.raises(ConfigError, match=r"got 'zzz'\.$"):
        find_model("zzz")


def test_a_folder_comes_first(tmp_path, monkeypatch):
    """But it is no model of records, which have that name, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    config = LlamaConfig(num_attention_heads=2, vocab_size=100, **sizes)
    monkeypatch.chdir(tmp_path)
    for name in ("llama-3.1-8b", "Qwen/Qwen3-VL-8B-Instruct"):
        (tmp_path / name).mkdir(parents=True)
        assert find_model(name).name == {"llama-3.1-8b": name}.get(name, "qwen3-vl-8b")
        config.save_pretrained(name)
        found = find_model(name)
        assert found.name == name.rpartition("/")[2] and len(found.decoder.layers) == 3
    shape_of.cache_clear()
    assert len(shape_of("llama-3.1-8b").decoder.layers) == 32
