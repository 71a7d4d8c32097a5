"""Each op gives what its reference gives, leaves its inputs alone, and takes any layout."""

import math
from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.numerics import quantize as numerics
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import sqnr_db
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary
from octavo.reference import attention as reference
from octavo.reference import gemm, paged
from octavo.reference.softmax import kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import MATMULS, AttentionCase, MatmulCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    Draw,
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)

FP8 = E4M3.dtype
EVERYTHING = AttentionSpec(causal=True, window=40, softcap=10.0, softmax_scale=0.2)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def attention_reference(inputs, return_lse=False):
    """What ops.attention promises, put together by hand."""
    inputs = dict(inputs)
    packing = inputs.pop("packing", None)
    rounding = kernel_rounding(inputs["q"].dtype, inputs["spec"])
    if packing is None:
        return reference.attention(**inputs, rounding=rounding)
    return reference.varlen_attention(**inputs, packing=packing, rounding=rounding)


ATTENTION_CASES = [
    AttentionCase(),
    AttentionCase(batch=0),
    AttentionCase(q_len=0),
    AttentionCase(kv_len=0, has_sinks=True),
    AttentionCase(q_len=3, kv_len=140, num_heads=9, num_kv_heads=3, head_dim=72),
    AttentionCase(q_len=140, kv_len=63, spec=EVERYTHING, has_sinks=True, has_key_mask=True),
    AttentionCase(q_len=5, spec=AttentionSpec(promote_every=None)),
    AttentionCase(q_len=5, kv_len=300, spec=AttentionSpec(promote_every=2)),
    PackedCase(),
    PackedCase(q_lens=()),
    PackedCase(q_lens=(5, 0, 130), kv_lens=(64, 7, 65), spec=EVERYTHING, has_sinks=True),
]


def make_inputs(case, **options):
    make = make_packed_inputs if isinstance(case, PackedCase) else make_attention_inputs
    return make(case, **options)


@pytest.mark.parametrize("dtype", [*DTYPES, E4M3.dtype, E5M2.dtype], ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_is_its_reference(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    expected, expected_lse = attention_reference(inputs)
    out = ops.attention(**inputs)
    natural = torch.bfloat16 if dtype.itemsize == 1 else dtype
    assert_same_bits(out, expected.to(natural))
    out, lse = ops.attention(**inputs, return_lse=True, out_dtype=torch.float32, impl="reference")
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_by_codes_is_its_reference(case):
    inputs = make_inputs(case, dtype=FP8)
    exact = ops.attention(**inputs, out_dtype=torch.float32)
    inputs["spec"] = replace(inputs["spec"], exponentials="codes")
    expected, _ = attention_reference(inputs)
    out = ops.attention(**inputs, out_dtype=torch.float32)
    assert_same_bits(out, expected)
    assert out.numel() == 0 or not exact.any() or not torch.equal(out, exact)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
def test_attention_with_scales_of_every_granularity(granularity):
    for case in (AttentionCase(q_len=33, kv_len=140), PackedCase()):
        inputs = make_inputs(case, dtype=FP8, granularity=granularity)
        expected, _ = attention_reference(inputs)
        assert_same_bits(ops.attention(**inputs, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_attention_within_the_budget_of_its_own_rounding(out_dtype):
    """The whole way: quantize, attend, compare with attention of the tensors before."""
    plain = make_attention_inputs(AttentionCase(q_len=65, kv_len=200), dtype=torch.bfloat16)
    quantized = ops.quantize_qkv(plain["q"], plain["k"], plain["v"])
    out = ops.attention(
        quantized.q, quantized.k, quantized.v, scales=quantized.scales, out_dtype=out_dtype
    )
    assert out.dtype == out_dtype
    fp8 = {"q": quantized.q, "k": quantized.k, "v": quantized.v, "scales": quantized.scales}
    truth, _ = reference.attention(**fp8, compute=torch.float64)
    model, _ = reference.attention(**fp8, rounding=kernel_rounding(FP8, AttentionSpec()))
    assert_within_budget(out, truth=truth, model=model)
    unquantized, _ = reference.attention(**plain, compute=torch.float64)
    assert sqnr_db(out, unquantized) > 20


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_attention_takes_strided_inputs(dtype):
    draw = Draw(0)
    q = draw.normal(2, 4, 33, 64).transpose(1, 2).to(dtype)
    k, v = (x.to(dtype) for x in draw.normal(2, 33, 2, 128).split(64, dim=-1))
    scales = QkvScales.ones() if dtype == FP8 else None
    assert not q.is_contiguous()
    out = ops.attention(q, k, v, scales=scales)
    expected = ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), scales=scales)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-2 if dtype == FP8 else 1e-6)


PAGED_CASES = [
    PagedCase(),
    PagedCase(lengths=(), q_lens=()),
    PagedCase(lengths=(0, 1), q_lens=(1, 1), has_sinks=True),
    PagedCase(lengths=(3, 65), q_lens=(3, 3)),
    PagedCase(lengths=(4, 65), q_lens=(4, 4), granularity=PerToken()),
    PagedCase(granularity=PerHead(), num_heads=9, num_kv_heads=3, head_dim=72, page_size=16),
    PagedCase(dtype=torch.bfloat16, layout="token_major"),
    PagedCase(spec=EVERYTHING, has_sinks=True, page_size=128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_decoding_is_its_reference(case, dtype):
    inputs = make_decode_inputs(case, dtype=dtype)
    q, view = inputs["q"], inputs["view"]
    ends = torch.arange(len(case.lengths) + 1, dtype=torch.int32) * q.shape[1]
    rounding = kernel_rounding(dtype, case.spec)
    expected, _ = paged.paged_attention(
        q.flatten(0, 1), view, ends, case.spec, sinks=inputs["sinks"], rounding=rounding
    )
    assert_same_bits(ops.decode_attention(**inputs), expected.view(q.shape).to(dtype))
    out = ops.decode_attention(**inputs, out_dtype=torch.float32, impl="reference")
    assert_same_bits(out, expected.view(q.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8], ids=str)
@pytest.mark.parametrize(
    "case", [*PAGED_CASES, PagedCase(lengths=(70, 65), q_lens=(70, 0))], ids=str
)
def test_prefill_is_its_reference(case, dtype):
    if dtype == FP8 and case.dtype != FP8:
        case = replace(case, dtype=FP8)
    inputs = make_prefill_inputs(case, dtype=dtype)
    rounding = kernel_rounding(dtype, case.spec)
    arguments = {name: value for name, value in inputs.items() if name != "max_seqlen_q"}
    expected, expected_lse = paged.paged_attention(**arguments, rounding=rounding)
    natural = torch.bfloat16 if dtype == FP8 else dtype
    assert_same_bits(ops.prefill_attention(**inputs), expected.to(natural))
    out, lse = ops.prefill_attention(
        **inputs, return_lse=True, out_dtype=torch.float32, impl="reference"
    )
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


def test_prefill_and_decode_agree():
    case = PagedCase(lengths=(5, 65, 130), q_lens=(2, 2, 2), granularity=PerToken())
    decode = make_decode_inputs(case)
    prefill = make_prefill_inputs(case) | {"q": decode["q"].flatten(0, 1)}
    out = ops.prefill_attention(**prefill)
    assert_same_bits(out.view(decode["q"].shape), ops.decode_attention(**decode))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        PagedCase(),
        PagedCase(granularity=PerHead(), dtype=E5M2.dtype),
        PagedCase(granularity=PerToken(), layout="token_major"),
        PagedCase(dtype=torch.float16),
    ],
    ids=str,
)
def test_append_is_its_reference(case, dtype):
    ours, theirs = make_paged_view(case), make_paged_view(case)
    draw = Draw(3)
    key, value = draw.normal(2, 6, 2, 64, dtype=dtype)
    slots = torch.tensor([0, 70, -1, 5, 129, 64])
    assert ops.append_kv(ours, key, value, slots) is None
    paged.append_kv(theirs, key, value, slots)
    for name in ("key_pages", "value_pages", "key_scale", "value_scale", "page_table", "lengths"):
        assert_same_bits(getattr(ours, name), getattr(theirs, name))


GRANULARITIES = [PerTensor(), PerHead(), PerToken(), PerChannel(), PerBlock(1, 16), PerBlock(16, 8)]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_quantize_is_its_reference(granularity, dtype, fmt):
    x = Draw(0).wide(5, 33, 40, dtype=dtype)
    x[0, 0, :3] = torch.tensor([math.nan, math.inf, -0.0])
    for options in ({}, {"margin": 1.5}, {"power_of_two": True}):
        ours = ops.quantize(x, granularity, fmt, **options)
        theirs = numerics.quantize(x, granularity, fmt, **options)
        assert_same_bits(ours.data, theirs.data)
        assert_same_bits(ours.scale, theirs.scale)
        assert ours.granularity == granularity
    again = ops.quantize(x, granularity, fmt, scale=ours.scale, impl="reference")
    assert_same_bits(again.data, ours.data)
    assert again.scale is ours.scale


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_quantize_takes_empty_tensors(granularity, shape):
    quantized = ops.quantize(torch.zeros(shape), granularity)
    assert quantized.data.shape == torch.Size(shape)
    assert tuple(quantized.scale.shape) == granularity.scale_shape(shape)
    assert (quantized.scale == 1.0).all()


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_quantize_takes_strided_tensors(granularity):
    x = Draw(0).normal(5, 33, 40)
    for strided in (x.transpose(0, 2), x[:, ::2], x[..., 3:19], x[:1].expand(4, -1, -1)):
        ours = ops.quantize(strided, granularity)
        expected = ops.quantize(strided.contiguous(), granularity)
        assert ours.data.is_contiguous()
        assert_same_bits(ours.data, expected.data)
        assert_same_bits(ours.scale, expected.scale)


def draw_qkv(seed: int = 0):
    draw = Draw(seed)
    q, k, v = (draw.normal(2, 5, heads, 40, dtype=torch.bfloat16) for heads in (6, 3, 3))
    return q, k, v


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_quantize_qkv_dynamic(granularity, fmt):
    tensors = draw_qkv()
    result = ops.quantize_qkv(*tensors, granularity=granularity, fmt=fmt)
    for name, x in zip("qkv", tensors, strict=True):
        expected = numerics.quantize(x, granularity, fmt)
        assert_same_bits(getattr(result, name), expected.data)
        assert_same_bits(getattr(result.scales, name), expected.scale)
    static = ops.quantize_qkv(*tensors, result.scales, fmt=fmt)
    for name in "qkv":
        assert_same_bits(getattr(static, name), getattr(result, name))
    assert static.scales is result.scales


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_quantize_qkv_with_a_history(granularity):
    history = tuple(AmaxHistory(granularity.scale_shape(x.shape)) for x in draw_qkv())
    seen = []
    for seed in range(20):
        tensors = draw_qkv(seed)
        seen.append([numerics.quantize(x, granularity).scale for x in tensors])
        result = ops.quantize_qkv(*tensors, history=history, granularity=granularity)
        for i, name in enumerate("qkv"):
            recent = torch.stack([scales[i] for scales in seen[-16:]])
            assert_same_bits(getattr(result.scales, name), recent.amax(dim=0))
    assert [int(one.num_passes) for one in history] == [20, 20, 20]


def test_quantize_qkv_takes_strided_tensors():
    """Views of one projection, as models make them."""
    joint = Draw(0).normal(2, 5, 12, 40, dtype=torch.bfloat16)
    q, k, v = joint.split([6, 3, 3], dim=2)
    result = ops.quantize_qkv(q, k, v)
    expected = ops.quantize_qkv(q.contiguous(), k.contiguous(), v.contiguous())
    for name in "qkv":
        assert getattr(result, name).stride()[-2:] == (48, 1)  # heads of 40 start aligned
        assert_same_bits(getattr(result, name), getattr(expected, name))


@pytest.mark.parametrize("case", MATMULS, ids=str)
def test_matmul_is_its_reference(case):
    inputs = make_matmul_inputs(case)
    expected = gemm.scaled_mm(**inputs)
    assert_same_bits(ops.scaled_mm(**inputs), expected.bfloat16())
    for out_dtype in (torch.float32, torch.float16):
        out = ops.scaled_mm(**inputs, out_dtype=out_dtype, impl="reference")
        assert_same_bits(out, expected.to(out_dtype))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 6, 8), (3, 0, 8), (3, 6, 0)])
def test_matmul_of_nothing(rows, columns, depth):
    inputs = make_matmul_inputs(MatmulCase(rows=rows, columns=columns, depth=depth, has_bias=True))
    out = ops.scaled_mm(**inputs)
    assert out.shape == (rows, columns)
    assert_same_bits(out, inputs["bias"].expand(rows, -1).contiguous())


def test_matmul_takes_strided_operands():
    draw = Draw(0)
    a, b = draw.normal(64, 8).t(), draw.normal(64, 6).t()
    weight = numerics.quantize(b, PerChannel())
    assert not weight.data.is_contiguous()
    out = ops.scaled_mm(a, weight, out_dtype=torch.float32)
    expected = a @ weight.dequantize().t()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)


def frozen_calls():
    """Every op with inputs of every kind, and the tensors that it must not touch."""
    dense = make_attention_inputs(
        AttentionCase(spec=EVERYTHING, has_sinks=True, has_key_mask=True), dtype=FP8
    )
    packed = make_packed_inputs(PackedCase(has_sinks=True))
    prefill = make_prefill_inputs(PagedCase(has_sinks=True), dtype=FP8)
    decode = make_decode_inputs(PagedCase(has_sinks=True, granularity=PerToken()))
    matmul = make_matmul_inputs(MatmulCase(has_bias=True))
    x = Draw(0).normal(5, 8)
    q, k, v = draw_qkv()
    return {
        "attention": (ops.attention, dense),
        "packed": (ops.attention, packed),
        "prefill_attention": (ops.prefill_attention, prefill),
        "decode_attention": (ops.decode_attention, decode),
        "scaled_mm": (ops.scaled_mm, matmul),
        "linear_gelu": (ops.linear_gelu, {"x": x, "weight": x, "bias": x[:, 0].contiguous()}),
        "matvec": (ops.matvec, {"x": x[:1], "weight": x, "bias": x[:, 0].contiguous()}),
        "quantize": (ops.quantize, {"x": x, "granularity": PerToken()}),
        "quantize_static": (ops.quantize, {"x": x, "scale": torch.ones(())}),
        "quantize_qkv": (ops.quantize_qkv, {"q": q, "k": k, "v": v}),
        "quantize_qkv_static": (
            ops.quantize_qkv,
            {"q": q, "k": k, "v": v, "scales": QkvScales.ones()},
        ),
        "rotate_qk": (
            ops.rotate_qk,
            {"q": q, "k": k, "rotary": Rotary(torch.ones(1, 4), torch.ones(1, 4))},
        ),
    }


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors that an argument is or holds."""
    held = [value] if isinstance(value, torch.Tensor) else getattr(value, "__dict__", {}).values()
    return [x for x in held if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", frozen_calls())
def test_no_input_is_changed(name):
    op, inputs = frozen_calls()[name]
    watched = [x for value in inputs.values() for x in tensors_in(value)]
    before = [(x.clone(), x._version) for x in watched]
    op(**inputs)
    for x, (copy, version) in zip(watched, before, strict=True):
        assert_same_bits(x, copy)
        assert x._version == version
