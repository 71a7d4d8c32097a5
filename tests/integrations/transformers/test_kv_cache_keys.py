"""KV caches with rotated and centered keys, and short passes, which are decoded."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")


from transformers import DynamicCache, StaticCache

from octavo import CalibrationSettings, Recipe, apply_, calibrate_kv, restore_
from octavo.calibration.scale_file import ScaleSet, save_scales
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.checkpoints.export import export_checkpoint
from octavo.integrations.transformers import kv_cache
from octavo.layers.decoder_attention import DecoderAttention
from octavo_testkit.models.text_models import FAMILIES, make_decoder, make_prompts

pytestmark = [
    pytest.mark.slow,  # in CI with `make test-slow`: it takes its time
    pytest.mark.filterwarnings("ignore:the model brings no scales"),
]
BOTH = {"rotate_keys": True, "center_keys": True}
TOKEN, HEAD = {"granularity": "token"}, {"granularity": "head", "scaling": "static"}
TENSOR = {"scaling": "static"}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make_planted(offset=2e5):
    """A Llama whose keys have one huge channel that hardly changes: a bias that does not turn."""
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e12}}
    model = make_decoder("llama", attention_bias=True, **options)
    for layer in model.model.layers:
        for projection in ("q", "k", "v", "o"):
            getattr(layer.self_attn, f"{projection}_proj").bias.data.zero_()
        layer.self_attn.k_proj.bias.data.view(2, 16)[:, 7] = offset
        layer.self_attn.q_proj.weight.data *= 4  # else values are most of the error
        layer.self_attn.q_proj.weight.data.view(4, 16, -1)[:, 7] *= 1e-3  # float32 has its limits
    return model


def calibrate(model, **settings):
    batches = [{"input_ids": make_prompts(1, 100, seed)["input_ids"]} for seed in (7, 8)]
    return calibrate_kv(model, batches, CalibrationSettings(granularity="head", **settings))


def logits_in_parts(model, ids, size, cache=None):
    parts = []
    for start in range(0, ids.shape[1], size):
        result = model(ids[:, start : start + size], past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("settings", [TOKEN, HEAD, TENSOR], ids=["token", "head", "tensor"])
def test_a_planted_channel_costs_nothing_without_the_mean(settings):
    model, ids = make_planted(), make_prompts(1, 60)["input_ids"]
    exact = model(ids).logits
    errors = {}
    for name, change in (("plain", {}), ("rotated", {"rotate_keys": True}), ("both", BOTH)):
        needs_scales = settings is not TOKEN or change is BOTH
        scales = calibrate(model, **change).to_dict() if needs_scales else None
        apply_(model, Recipe(kv_cache={**settings, **change}, scales=scales))
        found = logits_in_parts(model, ids, 4)
        errors[name] = float((found - exact).norm() / exact.norm())
        restore_(model)
    assert errors["both"] < 0.1 < 0.5 < min(errors["plain"], errors["rotated"])


@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_serves_every_family(family):
    model, prompts = make_decoder(family), make_prompts(3, 40)
    real = prompts["attention_mask"].bool()
    exact = model(**prompts).logits[real]
    for change in ({}, {"rotate_keys": True}):
        apply_(model, Recipe(kv_cache={"granularity": "token", **change}))
        found = model(**prompts).logits[real]
        assert 0 < (found - exact).norm() / exact.norm() < 0.1
        restore_(model)


def test_a_rotation_that_queries_lack_would_be_seen(monkeypatch):
    model, ids = make_decoder("llama"), make_prompts(1, 40)["input_ids"]
    exact = model(ids).logits
    apply_(model, Recipe(kv_cache={"granularity": "token", "rotate_keys": True}))
    monkeypatch.setattr(DecoderAttention, "_rotated", lambda self, q, sinks: q)
    assert (model(ids).logits - exact).norm() / exact.norm() > 0.1


@pytest.mark.parametrize("settings", [TOKEN, HEAD], ids=["token", "head"])
def test_generation_with_padding_beams_static_caches_and_skipped_layers(settings):
    model, prompts = make_decoder("mistral"), make_prompts(3, 20)
    scales = calibrate(model, **BOTH).to_dict()
    recipe = Recipe(kv_cache={**settings, **BOTH}, scales=scales, skip_layers=["1"])
    assert len(apply_(model, recipe).layers["kv_cache"]) == 3
    layers = [layer.self_attn.octavo_attention for layer in model.model.layers]
    assert [layer.rotates_keys for layer in layers] == [True, False, True, True]
    assert [layer.key_mean is None for layer in layers] == [False, True, False, False]
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    dynamic = model.generate(**prompts, **options)
    static = model.generate(**prompts, **options, cache_implementation="static")
    assert torch.equal(dynamic, static)


@pytest.mark.slow
def test_a_static_step_compiles_in_one_graph():
    model, ids = make_decoder("llama"), make_prompts(2, 12)["input_ids"]
    apply_(model, Recipe(kv_cache={**HEAD, **BOTH}, scales=calibrate(model, **BOTH).to_dict()))

    def run(step):
        cache = StaticCache(config=model.config, max_cache_len=64)
        found = [model(ids, past_key_values=cache).logits[:, -1:]]
        for _ in range(4):
            result = step(input_ids=found[-1].argmax(-1), past_key_values=cache)
            found.append(result.logits)
        return torch.cat(found, 1)

    expected = run(model)
    torch._dynamo.reset()
    assert torch.equal(run(torch.compile(model, backend="eager", fullgraph=True)), expected)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_passes_are_decoded(family, size, monkeypatch):
    model, ids = make_decoder(family), make_prompts(1, 30)["input_ids"].repeat(2, 1)
    ids[1] = ids[1].flip(0)
    expected = model(ids).logits
    assert kv_cache.attach(model, None) == []
    monkeypatch.setattr(DecoderAttention, "prefill", None)
    for cache in (None, StaticCache(config=model.config, max_cache_len=40)):
        found = logits_in_parts(model, ids, size, cache)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


def test_short_passes_leave_queries_as_they_are():
    model, ids = make_decoder("llama"), make_prompts(1, 41)["input_ids"]
    apply_(model, Recipe(kv_cache={"granularity": "token"}))
    one, four, five = (logits_in_parts(model, ids, size) for size in (1, 4, 5))
    torch.testing.assert_close(four, one, rtol=1e-5, atol=1e-5)
    assert (five - one).norm() / one.norm() > 1e-3


def test_a_mask_without_padding_is_none_and_one_with_padding_is_kept(monkeypatch):
    model, prompts = make_decoder("llama"), make_prompts(2, 20)
    mask, ids = prompts["attention_mask"], prompts["input_ids"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask.bool()
    expected = model(**prompts, position_ids=positions).logits[real]
    assert kv_cache.attach(model, None) == []
    called, prefill = [], DecoderAttention.prefill

    def watch(self, q, *args, **kwargs):
        called.append(len(q))
        return prefill(self, q, *args, **kwargs)

    monkeypatch.setattr(DecoderAttention, "prefill", watch)
    cache, parts = DynamicCache(config=model.config), []
    for start in range(0, 20, 4):
        part = slice(start, start + 4)
        options = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
        parts.append(model(ids[:, part], **options, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected, rtol=1e-4, atol=2e-5)
    assert called == [5] * 4  # the first part alone, where 3 of 8 columns are padding


@pytest.mark.parametrize(
    ("family", "what"), [("gpt_oss", "sinks"), ("gemma2", "a soft-cap")], ids=["sinks", "cap"]
)
def test_layers_that_cannot_be_centered(family, what):
    model = make_decoder(family)
    name = "model.layers.0.self_attn"
    with pytest.raises(UnsupportedError, match=f"{name}: .* to center keys, got {what}"):
        calibrate(model, center_keys=True)
    plain = calibrate(model)
    means = {n: replace(x, k_mean=((0.0,) * 16,) * 2) for n, x in plain.layers.items()}
    scales = ScaleSet(means).to_dict()
    with pytest.raises(UnsupportedError, match=f"{name}: .* to center keys, got {what}"):
        apply_(model, Recipe(kv_cache={**TOKEN, "center_keys": True}, scales=scales))
    apply_(model, Recipe(kv_cache={**TOKEN, "rotate_keys": True}))


ROTATED, CENTERED = {"rotate_keys": True}, {"center_keys": True}


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        ({}, ROTATED, "rotate_keys is set: .* octavo calibrate --kv --rotate-keys"),
        (ROTATED, {}, "rotate_keys is not set: .* set rotate_keys, or calibrate without"),
        ({}, CENTERED, "layers.0.self_attn: center_keys is set: .* --kv --center-keys"),
        (CENTERED, {}, "layers.0.self_attn: center_keys is not set: .* got one of centered keys"),
        (BOTH, {}, "rotate_keys is not set: .*; .*center_keys is not set"),
    ],
)
def test_scales_of_other_keys_are_refused(tmp_path, found, asked, said):
    model, file = make_decoder("llama"), tmp_path / "scales.json"
    save_scales(file, calibrate(model, **found))
    with pytest.raises(ConfigError, match=said):
        apply_(model, Recipe(kv_cache={**HEAD, **asked}, scales=file))
    apply_(model, Recipe(kv_cache={**HEAD, **found}, scales=file))


def test_a_cache_per_token_takes_the_means_alone(tmp_path):
    model, file = make_decoder("llama"), tmp_path / "scales.json"
    save_scales(file, calibrate(model, center_keys=True))
    for rotates in (False, True):
        settings = {**TOKEN, "center_keys": True, "rotate_keys": rotates}
        apply_(model, Recipe(kv_cache=settings, scales=file))
        layer = model.model.layers[0].self_attn.octavo_attention
        assert layer.key_mean.shape == (2, 16) and layer.query_scale is None
        restore_(model)
    save_scales(file, calibrate(model))
    with pytest.raises(ConfigError, match="center_keys is set"):
        apply_(model, Recipe(kv_cache={**TOKEN, "center_keys": True}, scales=file))


def test_means_of_another_shape():
    model = make_decoder("llama")
    scales = calibrate(make_decoder("llama", head_dim=8), **BOTH).to_dict()
    with pytest.raises(ConfigError, match=r"layers\.0.*shape \[2, 16\].* got .*\[2, 8\]"):
        apply_(model, Recipe(kv_cache={**HEAD, **BOTH}, scales=scales))


def test_scales_of_a_checkpoint_are_for_plain_keys(tmp_path):
    model = make_decoder("llama")
    model.save_pretrained(tmp_path / "plain")
    export_checkpoint(tmp_path / "plain", calibrate(model), tmp_path / "with")
    model.config.name_or_path = str(tmp_path / "with")
    with pytest.raises(ConfigError, match="rotate_keys: .* got a checkpoint with some"):
        apply_(model, Recipe(kv_cache={"rotate_keys": True}))
    apply_(model, Recipe(kv_cache={"rotate_keys": True, "scaling": "unit"}))
    restore_(model)
    model.config.name_or_path = str(tmp_path / "plain")
    with pytest.warns(UserWarning, match="brings no scales"):
        apply_(model, Recipe(kv_cache={"rotate_keys": True}))
