"""One attention layer of an encoder inside vLLM, against attention in float64."""

import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

HEADS = 4
LENGTHS = [1, 37, 63, 64, 101]
NAME = "visual.blocks.0.attn.attn"


@contextmanager
def engine_of(models, **arguments):
    """The config of an engine with a vision model, as the current one."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    shared = {"model": str(models / "qwen2_vl"), "dtype": "bfloat16", "enforce_eager": True}
    config = EngineArgs(**shared, **arguments).create_engine_config()
    load_general_plugins()
    with set_current_vllm_config(config):
        yield config


def make_layer(models, head_size, num_kv_heads=HEADS, **arguments):
    from vllm.model_executor.layers.attention import MMEncoderAttention

    with engine_of(models, **arguments):
        layer = MMEncoderAttention(
            HEADS, head_size, head_size**-0.5, num_kv_heads=num_kv_heads, prefix=NAME
        )
        layer.process_weights_after_loading(torch.bfloat16)
    return layer


def make_qkv(head_size, num_kv_heads=HEADS):
    """Views of one joint projection, of packed sequences, with cu_seqlens of these."""
    torch.manual_seed(head_size)
    heads = (HEADS, num_kv_heads, num_kv_heads)
    joint = torch.randn(1, sum(LENGTHS), sum(heads), head_size).bfloat16()
    return joint.split(heads, 2), torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def truth(q, k, v):
    """Attention of each packed sequence in float64, nothing rounded."""
    outputs = []
    for parts in zip(*(x[0].double().split(LENGTHS) for x in (q, k, v)), strict=True):
        q1, k1, v1 = (x.transpose(0, 1) for x in parts)
        k1, v1 = (x.repeat_interleave(len(q1) // len(x), 0) for x in (k1, v1))
        weights = (q1 @ k1.transpose(1, 2) / math.sqrt(q1.shape[-1])).softmax(-1)
        outputs.append((weights @ v1).transpose(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def error_of(output, expected):
    return (output.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()


@pytest.mark.parametrize("is_joint", [False, True], ids=["heads apart", "side by side"])
@pytest.mark.parametrize(
    ("head_size", "num_kv_heads"), [(64, 4), (72, 4), (80, 4), (128, 4), (72, 2)]
)
def test_packed_sequences_are_close_to_float64(models, head_size, num_kv_heads, is_joint):
    layer = make_layer(models, head_size, num_kv_heads, mm_encoder_attn_dtype="fp8")
    assert layer.fp8_enabled is False  # of vLLM's own path
    (q, k, v), cu_seqlens = make_qkv(head_size, num_kv_heads)
    given = [x.flatten(2) if is_joint else x for x in (q, k, v)]
    output = layer(*given, cu_seqlens=cu_seqlens, max_seqlen=torch.tensor(max(LENGTHS)))
    assert output.shape == given[0].shape
    assert output.dtype == torch.bfloat16
    # e4m3 has 3 bits behind the point: about 2.5 % for each of Q, K, P and V.
    expected = truth(q, k, v)
    assert 0.005 < error_of(output.reshape(expected.shape), expected) < 0.06


@pytest.mark.parametrize("backend", [None, "TORCH_SDPA"])
def test_without_fp8_a_layer_is_vllms_to_the_bit(models, monkeypatch, backend):
    from vllm.model_executor import custom_op

    layer = make_layer(models, 72, mm_encoder_attn_backend=backend)
    assert type(layer).__name__ == "OctavoEncoderAttention"
    monkeypatch.delitem(custom_op.op_registry_oot, "MMEncoderAttention")
    stock = make_layer(models, 72, mm_encoder_attn_backend=backend)
    assert type(stock).__name__ == "MMEncoderAttention"
    (q, k, v), cu_seqlens = make_qkv(72)
    output = layer(q, k, v, cu_seqlens=cu_seqlens)
    assert torch.equal(output, stock(q, k, v, cu_seqlens=cu_seqlens))
    assert error_of(output, truth(q, k, v)) < 0.005


def test_large_negative_values_are_not_cut_off(models):
    """vLLM's own amax is signed: its scale of this q would be that of the ordinary values."""
    layer = make_layer(models, 72, mm_encoder_attn_dtype="fp8")
    (q, k, v), cu_seqlens = make_qkv(72)
    q, v = q.clone(), v.clone()
    q[0, 10, 1, 3] = -30
    v[0, 20:60, 2, 5] = -25
    output = layer(q, k, v, cu_seqlens=cu_seqlens)
    scales = layer.octavo.scaling.scales()
    assert float(scales.q) == pytest.approx(30 / 448)
    assert float(scales.v) == pytest.approx(25 / 448)
    assert float(q.amax()) < 6  # what the signed one sees
    assert error_of(output, truth(q, k, v)) < 0.06


def test_large_values_are_forgotten_after_sixteen_passes(models):
    layer = make_layer(models, 72, mm_encoder_attn_dtype="fp8")
    (q, k, v), cu_seqlens = make_qkv(72)
    layer(q, k * 10, v, cu_seqlens=cu_seqlens)
    scales = []
    for _ in range(16):
        layer(q, k, v, cu_seqlens=cu_seqlens)
        scales.append(float(layer.octavo.scaling.scales().k))
    amax = float(k.abs().amax())
    assert scales[:15] == pytest.approx([float((k * 10).abs().amax()) / 448] * 15)
    assert scales[15] == pytest.approx(amax / 448)


def test_static_scales_are_those_of_the_file(models, tmp_path):
    path = tmp_path / "scales.json"
    dynamic = make_layer(models, 72, mm_encoder_attn_dtype="fp8")
    (q, k, v), cu_seqlens = make_qkv(72)
    expected = dynamic(q, k, v, cu_seqlens=cu_seqlens)
    scales = vars(dynamic.octavo.scaling.scales())
    path.write_text(json.dumps({NAME: {key: float(scale) for key, scale in scales.items()}}))
    options = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(path)}
    static = make_layer(models, 72, **options)
    assert torch.equal(static(q, k, v, cu_seqlens=cu_seqlens), expected)
    # Beyond the range of its scales a layer saturates, which this test would notice.
    assert error_of(static(q, k, 50 * v, cu_seqlens=cu_seqlens), truth(q, k, 50 * v)) > 0.5


def test_a_backend_that_was_asked_for_is_refused_by_vllm(models):
    with pytest.raises(ValueError, match="mm_encoder_attn_dtype='fp8' requires"):
        make_layer(models, 72, mm_encoder_attn_dtype="fp8", mm_encoder_attn_backend="TORCH_SDPA")


def test_compilation_of_the_encoder_is_refused(models):
    from octavo.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="does not support compile_mm_encoder"):
        make_layer(
            models,
            72,
            mm_encoder_attn_dtype="fp8",
            compilation_config={"compile_mm_encoder": True},
        )


def test_a_gpu_without_fp8_is_refused(models, monkeypatch):
    """Asked on a CPU: no GPU has run this."""
    from octavo.errors import UnsupportedError
    from octavo.integrations.vllm import encoder
    from octavo.ops import check

    gpu = SimpleNamespace(type="cuda", capability=(8, 0), name="NVIDIA A100")
    platform = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(check, "describe", lambda _: gpu)
    monkeypatch.setattr(encoder, "current_platform", platform)
    with pytest.raises(UnsupportedError, match="sm_89 or newer"):
        make_layer(models, 72, mm_encoder_attn_dtype="fp8")


def test_registering_twice_keeps_the_first_class(models):
    from vllm.model_executor.custom_op import op_registry_oot

    from octavo.integrations.vllm.plugin import register

    register()
    before = op_registry_oot["MMEncoderAttention"]
    register()
    assert op_registry_oot["MMEncoderAttention"] is before
    assert before.__name__ == "OctavoEncoderAttention"
