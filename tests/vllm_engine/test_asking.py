"""Who gets octavo inside vLLM: an engine starts with what it asked for, or says why not."""

import pytest

from octavo_testkit.vllm_engine.engines import BACKEND, is_0_26, run_engines

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OCTAVO = {"attention_backend": BACKEND}
LINEAR = {"quantization": "octavo"}


def linear(**settings):
    return {**LINEAR, "additional_config": {"octavo": settings}}


REFUSED = {
    "part": (linear(ignored_layers=["q_proj"]), "ConfigError: ignored_layers matches 'model.layer"),
    "nothing": (linear(ignored_layers=["up"]), "ConfigError: pattern 'up' matches none of the 18"),
    "key": (linear(liner="fp8"), "ConfigError: --additional-config: octavo: unknown key 'liner'"),
    "static": (linear(linear={"scaling": "static"}), "'static' is not supported inside vLLM"),
    "blocks": (
        linear(linear={"weight": "block 128x128"}) | {"model": "odd"},
        "expected shards of whole blocks of 128 outputs",
    ),
    "lora": ({**LINEAR, "enable_lora": True}, "--quantization octavo does not support LoRA"),
    "made by octavo": (
        {"hf_overrides": {"quantization_config": {"quant_method": "octavo"}}},
        "takes a checkpoint with plain weights, got one with a quantization_config of 'octavo'",
    ),
    "unread": (
        {**OCTAVO, "additional_config": {"octavo": {"linear": "fp8"}}},
        "which need --quantization octavo",
    ),
    "e5m2": (
        {**OCTAVO, "kv_cache_dtype": "fp8_e5m2"},
        "UnsupportedError: OCTAVO does not support a KV cache in fp8_e5m2",
    ),
    "kind": (
        {"attention_config": {"backend_per_kind": {"full_attention": BACKEND}}},
        f"on a CPU {BACKEND} runs all layers or none",
    ),
}


@pytest.fixture(scope="module")
def refused(models, tmp_path_factory):
    from octavo_testkit.vllm_engine import tiny_models

    tiny_models.save_llama(models / "odd", head_dim=48)
    jobs = {
        name: {**engine, "model": str(models / engine.get("model", "llama"))}
        for name, (engine, _) in REFUSED.items()
    }
    return run_engines(jobs, tmp_path_factory.mktemp("refused"), prompts=[[5, 6]])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_a_reason(refused, name):
    assert REFUSED[name][1] in refused[name]["error"]


@pytest.mark.parametrize("case", ["absent", "untested"])
def test_without_the_plug_in_its_names_do_not_exist(models, tmp_path, case):
    """Absent, or left out because nobody has tried this version of vLLM."""
    model = {"model": str(models / "llama")}
    jobs = {"plain": model, "attention": {**model, **OCTAVO}, "linear": {**model, **LINEAR}}
    options = {"VLLM_PLUGINS": ""}
    if case == "untested":
        options = {"before": "import vllm.version\nvllm.version.__version__ = '0.99.0'"}
    found = run_engines(jobs, tmp_path, **options)
    assert {kind for kind, *_ in found["plain"]["attention"].values()} == {
        "CPUAttentionBackendImpl"
    }
    if is_0_26():  # it has the name for everybody, and takes no notice of it on a CPU
        assert found["attention"]["attention"] == found["plain"]["attention"]
    else:
        assert BACKEND in found["attention"]["error"]
    assert "octavo" in found["linear"]["error"]
    log = (tmp_path / "log").read_text()
    assert ("octavo leaves vLLM 0.99.0 alone" in log) == (case == "untested")
