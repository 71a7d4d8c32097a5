"""Warm-up runs every op that a model needs; on a CPU with the reference."""

from importlib import import_module

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.decode.config import DecodeShape, default, default_gluon
from octavo.kernels.device import Device
from octavo.kernels.quantize_qkv.config import default as default_qkv
from octavo.kernels.quantize_qkv.config import token_classes
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerTensor, PerToken
from octavo.ops.quantize_qkv import quantize_qkv
from octavo.ops.warm_up import (
    BATCHES,
    ROOMS,
    ROWS,
    AttentionLayers,
    LinearLayers,
    check_gpu,
    warm_up_calls,
)

DECODER = AttentionLayers(num_heads=4, num_kv_heads=2, head_dim=32)
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
ENCODER = AttentionLayers(num_heads=2, num_kv_heads=2, head_dim=40, is_decoder=False)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (ENCODER, {"quantize_qkv": 2 + 2 * len(token_classes(1)), "attention": 4, "rotate_qk": 1}),
        (
            DECODER,
            {
                "append_kv": 2,
                "prefill_attention": 4,
                "decode_attention": len(BATCHES) * len(ROOMS),
            },
        ),
        (
            LinearLayers(64, 32),
            {"quantize": len(ROWS), "scaled_mm": 4 * len(ROWS), "matvec": 2},
        ),
        (LinearLayers(64, 32, rows=(5,)), {"quantize": 1, "scaled_mm": 4}),
        (LinearLayers(64, 32, rows=(5,), activation=None), {"scaled_mm": 2}),
        (
            LinearLayers(64, 32, rows=(5,), activation=PerTensor(), is_static=True),
            {"quantize": 1, "scaled_mm": 4},
        ),
    ],
)
def test_every_op_is_called(layers, expected):
    names = list(ops.warm_up([layers], "cpu"))
    found = [name.split(": ")[-1].split(",")[0] for name in names]
    assert {name: found.count(name) for name in found} == expected


def test_a_cache_that_is_not_fp8_has_no_fp8_queries():
    layers = AttentionLayers(num_heads=4, num_kv_heads=2, head_dim=32, page_dtype=torch.bfloat16)
    names = list(ops.warm_up([layers], "cpu"))
    assert not any("FP8" in name for name in names)
    assert len(names) == 3 + len(BATCHES) * len(ROOMS)


def test_an_encoder_meets_every_class_of_tokens(monkeypatch):
    """The kernels of quantize_qkv are compiled for a number of partial amax values."""
    seen = set()

    def record(q, k, v, scales=None, **options):
        if scales is None:
            seen.add(default_qkv(len(q), 1))
        return quantize_qkv(q, k, v, scales, **options)

    monkeypatch.setattr(import_module("octavo.ops.warm_up"), "quantize_qkv", record)
    for _, call in warm_up_calls([ENCODER], torch.device("cpu")):
        call()
    assert seen == {default_qkv(num_tokens, 1) for num_tokens in range(1, 10_000)}


@pytest.mark.parametrize("configure", [default, default_gluon])
@pytest.mark.parametrize("page_dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_decoder_meets_every_class_of_room(batch, page_dtype, configure):
    def config(max_tokens):
        shape = DecodeShape(
            num_sequences=batch,
            q_len=1,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            page_size=16,
            max_pages=max_tokens // 16,
            q_dtype=torch.bfloat16,
            page_dtype=page_dtype,
        )
        return configure(shape, H200)

    assert {config(room) for room in ROOMS} == {config(room) for room in range(16, 20_000, 16)}


def test_a_window_sinks_and_softcap():
    spec = AttentionSpec(causal=True, window=16, softcap=20.0)
    layers = AttentionLayers(num_heads=2, num_kv_heads=1, head_dim=32, spec=spec, has_sinks=True)
    for _, call in warm_up_calls([layers], torch.device("cpu")):
        call()


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (LinearLayers(128, 256, rows=(3,)), {("FP8", None, False), ("plain", PerToken(), False)}),
        (LinearLayers(128, 256, rows=(3,), activation=None), {("plain", None, False)}),
        (
            LinearLayers(128, 256, rows=(3,), activation=PerTensor(), is_static=True),
            {("FP8", None, False), ("plain", PerTensor(), True)},
        ),
    ],
)
def test_a_linear_layer_calls_what_it_will_call(monkeypatch, layers, expected):
    """Its plain input goes to the product, with its scale if that is given."""
    module, seen = import_module("octavo.ops.warm_up"), set()

    def record(a, b, bias=None, *, activation=None, scale=None):
        is_plain = isinstance(a, torch.Tensor)
        assert b.data.shape == (128, 256) and len(a if is_plain else a.data) == 3
        seen.add(("plain" if is_plain else "FP8", activation, scale is not None))

    monkeypatch.setattr(module, "scaled_mm", record)
    for _, call in warm_up_calls([layers], torch.device("cpu")):
        call()
    assert seen == expected


def test_only_a_gpu_is_compiled_for(monkeypatch):
    module = import_module("octavo.ops.warm_up")
    with pytest.raises(UnsupportedError, match="compiled on the GPU they will run on, got CPU"):
        check_gpu("cpu")
    monkeypatch.setattr(module, "default_device", lambda: H200)
    assert check_gpu() is H200


def test_nothing_to_compile():
    with pytest.raises(ConfigError, match="got none"):
        next(ops.warm_up([], "cpu"))


def test_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="multiple of the KV heads"):
        AttentionLayers(num_heads=3, num_kv_heads=2, head_dim=32)
