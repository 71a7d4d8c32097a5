"""Warm-up runs every op that a model needs; on a CPU with the reference."""

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec
from octavo.ops.warm_up import BATCHES, ROWS, AttentionLayers, LinearLayers, warm_up_calls

DECODER = AttentionLayers(num_heads=4, num_kv_heads=2, head_dim=32)
ENCODER = AttentionLayers(num_heads=2, num_kv_heads=2, head_dim=40, is_decoder=False)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (ENCODER, {"quantize_qkv": 4, "attention": 2}),
        (DECODER, {"append_kv": 2, "prefill_attention": 2, "decode_attention": len(BATCHES)}),
        (LinearLayers(64, 32), {"quantize": len(ROWS), "scaled_mm": 2 * len(ROWS)}),
    ],
)
def test_every_op_is_called(layers, expected):
    names = list(ops.warm_up([layers], "cpu"))
    found = [name.split(": ")[-1].split(",")[0] for name in names]
    assert {name: found.count(name) for name in found} == expected


def test_a_cache_that_is_not_fp8_has_no_fp8_queries():
    layers = AttentionLayers(num_heads=4, num_kv_heads=2, head_dim=32, page_dtype=torch.bfloat16)
    names = list(ops.warm_up([layers], "cpu"))
    assert not any("FP8" in name for name in names) and len(names) == 2 + len(BATCHES)


def test_a_window_sinks_and_softcap():
    spec = AttentionSpec(causal=True, window=16, softcap=20.0)
    layers = AttentionLayers(num_heads=2, num_kv_heads=1, head_dim=32, spec=spec, has_sinks=True)
    for _, call in warm_up_calls([layers], torch.device("cpu")):
        call()


def test_nothing_to_compile():
    with pytest.raises(ConfigError, match="got none"):
        next(ops.warm_up([], "cpu"))


def test_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="multiple of the KV heads"):
        AttentionLayers(num_heads=3, num_kv_heads=2, head_dim=32)
