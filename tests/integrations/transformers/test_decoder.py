"""Caches that were filled are as after a prefill of the same keys and values."""

import pytest
import torch

pytest.importorskip("transformers")

from octavo.errors import UnsupportedError
from octavo.integrations.transformers import decoder, kv_cache
from octavo.integrations.transformers.decoder import (
    fill_cache,
    find_scales,
    make_decoder,
    make_static_cache,
    random_keys_and_values,
)
from octavo.integrations.transformers.paged_cache import PagedLayer
from octavo.recipe import KvCacheSettings
from octavo.testing.asserts import assert_same_bits

CPU = torch.device("cpu")
PAGES = {
    "bf16": None,
    "fp8-unit": KvCacheSettings(scaling="unit"),
    "fp8-token": KvCacheSettings(granularity="token"),
}
LENGTH, ROOM = 150, 8


@pytest.fixture
def model():
    return make_decoder("tiny", CPU)


def record_update(cache):
    """What a cache is given from now on, by layer."""
    given, update = {}, cache.update

    def spy(key, value, layer, *args, **kwargs):
        given.setdefault(layer, []).append((key, value))
        return update(key, value, layer, *args, **kwargs)

    cache.update = spy
    return given


@torch.no_grad()
def take_steps(model, cache, ids):
    """Logits of the columns of ids, one after the other."""
    logits = []
    for i in range(ids.shape[1]):
        position = torch.full((1, 1), LENGTH + i)
        column = ids[:, i : i + 1]
        logits.append(model(column, position_ids=position, past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("recipe", ["stock", *PAGES])
def test_a_step_after_filling_is_one_after_a_prefill(model, recipe, monkeypatch):
    monkeypatch.setattr(decoder, "NUM_COLUMNS", 64)  # two whole parts and one of 22
    if recipe != "stock":
        kv_cache.attach(model, PAGES[recipe])
    ids = torch.randint(2, 256, (2, LENGTH + 3), generator=torch.Generator().manual_seed(0))
    computed, filled = (make_static_cache(model, LENGTH + ROOM) for _ in range(2))
    given = record_update(computed)
    with torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=computed)

    def source(layer, start, stop):
        ((key, value),) = given[layer]
        return key[:, :, start:stop], value[:, :, start:stop]

    fill_cache(model, filled, source, LENGTH)
    assert int(filled.get_seq_length()) == int(computed.get_seq_length()) == LENGTH
    for ours, theirs in zip(filled.layers, computed.layers, strict=True):
        assert isinstance(ours, PagedLayer) == (recipe != "stock")
        if recipe != "stock":
            assert ours.num_seen == theirs.num_seen
            assert ours.sequences.lengths.tolist() == [LENGTH, LENGTH]
            assert int(ours.sequences.num_columns) == LENGTH
            assert_same_bits(ours.key_pages, theirs.key_pages)
            assert_same_bits(ours.value_pages, theirs.value_pages)
    del computed.update
    found, expected = (take_steps(model, c, ids[:, LENGTH:]) for c in (filled, computed))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert int(filled.get_seq_length()) == LENGTH + 3
    with pytest.raises(AssertionError):  # one token less is another result
        short = make_static_cache(model, LENGTH + ROOM)
        fill_cache(model, short, source, LENGTH - 1)
        other = take_steps(model, short, ids[:, LENGTH:])
        torch.testing.assert_close(other, expected, rtol=1e-6, atol=1e-6)


def test_the_same_keys_and_values_for_everyone(model):
    first, second = (random_keys_and_values(model, 2) for _ in range(2))
    for one, other in zip(first(1, 64, 100), second(1, 64, 100), strict=True):
        assert one.shape == (2, 2, 36, 32) and one.dtype == torch.bfloat16
        assert_same_bits(one, other)
    key, value = first(1, 64, 100)
    for other in (first(0, 64, 100), first(1, 0, 36)):
        assert not torch.equal(key, other[0]) and not torch.equal(value, other[1])
    assert not torch.equal(key, value)


def test_values_have_a_mean_of_their_own(model):
    """One for each sequence, head and dimension, the same in all parts; keys have none."""
    source = random_keys_and_values(model, 2)
    means = [[x.float().mean(2) for x in source(0, start, start + 2000)] for start in (0, 2000)]
    (first_key, first_value), (_, second_value) = means
    assert float(first_key.abs().max()) < 0.15
    assert float((first_value - second_value).abs().max()) < 0.2
    assert 0.6 < float(first_value.std()) < 1.4


def test_scales_are_those_of_what_fills_the_cache(model, monkeypatch):
    monkeypatch.setattr(decoder, "NUM_COLUMNS", 64)
    source = random_keys_and_values(model, 2)
    scales = find_scales(model, source, LENGTH)
    assert list(scales.layers) == [f"model.layers.{i}.self_attn" for i in range(2)]
    for i in range(2):
        parts = [source(i, *part) for part in ((0, 64), (64, 128), (128, 150))]
        layer = scales.layer(f"model.layers.{i}.self_attn")
        for which, found in enumerate((layer.k, layer.v)):
            x = torch.cat([part[which] for part in parts], 2).float()
            expected = x.abs().amax((0, 2, 3)) / 448
            torch.testing.assert_close(torch.tensor(found), expected)


def test_windows_are_not_filled(model):
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = 16
    kv_cache.attach(model, None)
    with pytest.raises(UnsupportedError, match="expected a layer that sees all keys"):
        fill_cache(model, make_static_cache(model, 64), random_keys_and_values(model, 1), 20)


def test_a_decoder_like_gpt_oss_has_its_attention_and_a_dense_mlp():
    from octavo.integrations.transformers.decoder import CONFIGS, about_decoder, make_decoder

    model = make_decoder("tiny-gpt-oss", torch.device("cpu"), dtype=torch.float32)
    first, second = model.model.layers
    assert type(first.self_attn).__name__ == "GptOssAttention"
    assert first.self_attn.sinks.shape == (4,)
    assert (first.self_attn.sliding_window, second.self_attn.sliding_window) == (32, None)
    assert about_decoder(model)["mlp"] == "dense 128 in place of experts"
    x = torch.randn(1, 3, 64)
    gate, up = first.mlp.gate_up(x).chunk(2, -1)
    expected = first.mlp.down((up + 1) * gate * torch.sigmoid(1.702 * gate))
    torch.testing.assert_close(first.mlp(x)[0], expected)
    again = make_decoder("tiny-gpt-oss", torch.device("cpu"), dtype=torch.float32)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    sizes = CONFIGS["gpt-oss-like"]
    assert sizes["dense_size"] == 11520 and sizes["sliding_window"] == 128


def test_what_is_said_of_a_llama():
    from octavo.integrations.transformers.decoder import about_decoder, make_decoder

    model = make_decoder("tiny", torch.device("cpu"), 1)
    assert about_decoder(model) == {"weights": "random", "layers": 1}
