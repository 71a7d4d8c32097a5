"""A token after a long context: everyone has the same tokens, and wrong logits end the run."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.decoder import make_decoder
from octavo.measure.bench import generate
from octavo.measure.bench.generate import GenerateCase, run_generate

ALL = ["bf16", "fp8", "fp8-head", "fp8-token", "stock"]


@pytest.fixture(scope="module")
def model():
    return make_decoder("tiny", torch.device("cpu"))


def run(model, recipes=ALL, context=200, batch=2):
    case = GenerateCase(context, batch)
    return run_generate(model, case, recipes, about={"model": "tiny"}, command="octavo bench")


def test_records_have_time_error_and_memory(model):
    records = {record.case["recipe"]: record for record in run(model)}
    assert list(records) == ALL
    for recipe, record in records.items():
        assert record.case["context"] == 200 and record.baseline == "bf16"
        assert record.values["median_ms"] > 0 and record.values["speedup"] > 0
        assert (record.values["relative_rms"] == 0) == (recipe == "bf16")
    assert records["stock"].values["relative_rms"] < 0.03 < MAX_FP8
    assert records["fp8"].values["cache_ratio"] == 0.5
    assert records["fp8-token"].values["cache_ratio"] == 0.5 + 4 / 64  # a float for 32 values
    assert records["fp8"].impl == "octavo" and records["stock"].impl == "transformers"
    assert not hasattr(model.model.layers[0].self_attn, "octavo_attention")


MAX_FP8 = generate.MAX_ERROR["fp8"]


def test_wrong_logits_end_the_run(model, monkeypatch):
    monkeypatch.setitem(generate.MAX_ERROR, "fp8", 1e-6)
    with pytest.raises(UnsupportedError, match="generate with fp8 is wrong"):
        run(model, ["bf16", "fp8"])


def test_what_is_refused(model):
    with pytest.raises(ConfigError, match=r"expected recipes of stock, bf16.*got \['int4'\]"):
        run(model, ["bf16", "int4"])
    with pytest.raises(ConfigError, match="a context and a batch of at least 1"):
        GenerateCase(0)
    with pytest.raises(ConfigError, match="expected one of llama-3.1-8b, tiny"):
        make_decoder("llama-4", torch.device("cpu"))
