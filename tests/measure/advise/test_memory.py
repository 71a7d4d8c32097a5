"""Bytes of KV caches: figures that can be worked out by hand."""

import pytest

pytest.importorskip("transformers")

from octavo.amounts import parse_bytes, parse_tokens
from octavo.errors import ConfigError
from octavo.integrations.transformers.cache_layers import CachedModel, CacheLayer
from octavo.measure.advise.memory import (
    cache_memory,
    memory_notes,
    memory_table,
)
from octavo.recipe import KvCacheSettings

# Llama-3.1-8B: 32 layers of 8 heads of 128.
LLAMA = tuple(CacheLayer(f"model.layers.{i}.self_attn", i, 8, 128) for i in range(32))
FP8 = KvCacheSettings(scaling="unit")


def test_llama_in_bf16_and_fp8():
    full, fp8 = (cache_memory(LLAMA, 131072, settings) for settings in (None, FP8))
    assert (full.per_token, full.sequence) == (131072, 16 * 2**30)
    assert (fp8.per_token, fp8.sequence, fp8.static_scales) == (65536, 8 * 2**30, 32 * 8)
    assert full.rings == full.static_scales == full.token_scales == 0


def test_scales_and_skipped_layers_count():
    token = cache_memory(LLAMA, 64, KvCacheSettings(granularity="token"))
    assert token.per_token == 32 * 2 * 8 * (128 + 4)
    assert token.token_scales == 64 * 32 * 2 * 8 * 4 and token.static_scales == 0
    head = cache_memory(LLAMA, 64, KvCacheSettings(granularity="head", scaling="unit"))
    assert head.static_scales == 32 * 2 * 8 * 4
    skipping = cache_memory(LLAMA, 64, FP8, ["0-1", "31"])
    assert skipping.per_token == 29 * 2048 + 3 * 4096 and skipping.static_scales == 29 * 8
    with pytest.raises(ConfigError, match="matches none"):
        cache_memory(LLAMA, 64, FP8, ["sliding_window"])


def test_a_window_takes_a_ring_whatever_the_context():
    layers = [CacheLayer("a", 0, 1, 64, 1024), CacheLayer("b", 1, 1, 64)]
    ring = 1024 + 256 + 64
    for context in (1, 65, 131072):
        found = cache_memory(layers, context, FP8)
        assert (found.per_token, found.rings) == (128, ring * 128)
        assert found.sequence == found.rings + -(-context // 64) * 64 * 128


def test_how_many_fit():
    model = CachedModel("llama", LLAMA, 15 * 2**30, 131072)
    table = memory_table(model, 131072, FP8, [], 141 * 2**30)
    assert table.rows[-1][1:3] == (7, 15)  # (141 − 15) / 16 and / 8, whole ones
    small = memory_table(model, 131072, FP8, [], 10 * 2**30)
    assert small.rows[-1][1:] == (0, 0, None)
    assert "do not fit" in " ".join(memory_notes(model, 131072, 10 * 2**30))
    assert "--gpu-memory" in " ".join(memory_notes(model, 131072, None))
    assert "made for 131,072" in " ".join(memory_notes(model, 131073, None))


@pytest.mark.parametrize(
    ("text", "count"), [("128k", 131072), ("4096", 4096), ("1M", 2**20), ("0.5k", 512), (" 1 ", 1)]
)
def test_tokens(text, count):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "0", "k", "-1", "1.5", "128kb", "0.0001k", "1e3"])
def test_no_tokens(text):
    with pytest.raises(ConfigError, match="expected a number of tokens"):
        parse_tokens(text)
    with pytest.raises(ConfigError, match="one token or more"):
        cache_memory(LLAMA, 0, FP8)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("141GiB", 141 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("7", 7),
        ("24g", 24 * 10**9),
    ],
)
def test_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "0GiB", "-1GB", "80 bytes", "1ib"])
def test_no_bytes(text):
    with pytest.raises(ConfigError, match="expected an amount of memory"):
        parse_bytes(text)
