"""A token after a long context: everyone has the same keys, and wrong logits end the run."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers.decoder import make_decoder
from octavo.layers.decoder_attention import DecoderAttention
from octavo.measure.bench import generate
from octavo.measure.bench.generate import GenerateCase, run_generate

ALL = ["bf16", "fp8", "fp8-head", "fp8-token", "fp8-unit", "stock"]


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
        # Half of what is allowed, so that a limit is no coin toss on another machine.
        limit = generate.MAX_ERROR["fp8" if recipe.startswith("fp8") else "bf16"]
        assert record.values["relative_rms"] < limit / 2
    assert records["fp8"].values["cache_ratio"] == 0.5
    assert records["fp8-token"].values["cache_ratio"] == 0.5 + 4 / 64  # a float for 32 values
    assert records["fp8"].impl == "octavo" and records["stock"].impl == "transformers"
    assert not hasattr(model.model.layers[0].self_attn, "octavo_attention")


@pytest.mark.parametrize("context", [1, 200, 3000])
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-token"])
def test_attention_that_is_zero_ends_the_run(model, monkeypatch, recipe, context):
    def decode(self, q, view, **options):
        return torch.zeros_like(q)

    run(model, ["stock", recipe], context, batch=1)
    monkeypatch.setattr(DecoderAttention, "decode", decode)
    with pytest.raises(UnsupportedError, match=f"generate with {recipe} is wrong.*got 1"):
        run(model, ["stock", recipe], context, batch=1)


def test_what_the_recipes_are(model, monkeypatch):
    """fp8 and fp8-head are calibrated and lose nothing; fp8-unit counts what it loses."""
    made = {}

    def look(copied, cache, *args):
        fill_cache(copied, cache, *args)
        layers = [m for m in copied.modules() if isinstance(m, DecoderAttention)]
        made[len(made)] = layers[0]

    def draw(model, batch):
        drawn = random_keys_and_values(model, batch)
        return lambda *args: tuple(200 * x for x in drawn(*args))

    fill_cache, random_keys_and_values = generate.fill_cache, generate.random_keys_and_values
    monkeypatch.setattr(generate, "fill_cache", look)
    monkeypatch.setattr(generate, "random_keys_and_values", draw)
    monkeypatch.setitem(generate.MAX_ERROR, "fp8", 10.0)
    with pytest.warns(UserWarning, match="lie beyond the range"):
        run(model, ["fp8", "fp8-head", "fp8-unit", "fp8-token"])
    tensor, head, unit, token = made.values()
    assert tensor.key_scale.dim() == 0 and tensor.key_scale > 1
    assert head.key_scale.shape == (2,) and head.key_scale.max() == tensor.key_scale
    assert not tensor.counts_saturation and not head.counts_saturation
    assert unit.key_scale == 1 and unit.counts_saturation and (unit.saturated > 0).all()
    assert str(token.granularity) == "token"


def test_wrong_logits_end_the_run(model, monkeypatch):
    monkeypatch.setitem(generate.MAX_ERROR, "fp8", 1e-6)
    with pytest.raises(UnsupportedError, match="generate with fp8 is wrong"):
        run(model, ["bf16", "fp8"])


def test_what_is_refused(model):
    with pytest.raises(ConfigError, match="row int4: expected words out of .*fp8-head.*got 'int4'"):
        run(model, ["bf16", "int4"])
    with pytest.raises(ConfigError, match="expected plain rows of bf16, stock; got fp16"):
        run(model, ["bf16", "fp16"])
    with pytest.raises(ConfigError, match="a context and a batch of at least 1"):
        GenerateCase(0)
    with pytest.raises(ConfigError, match="expected one of llama-3.1-8b, tiny"):
        make_decoder("llama-4", torch.device("cpu"))
